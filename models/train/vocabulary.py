"""Train a byte-level BPE vocabulary, and write it as a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from regard.models.tokenizer import MARK_TEXT, PATTERN


def train(texts: Iterable[str], size: int, path: Path) -> None:
    """A vocabulary of `size` pieces; the mark between texts comes first."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[MARK_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    about = json.loads(made.to_str())
    # As a special token the mark would be found in texts that happen to spell it.
    about["added_tokens"] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about, ensure_ascii=False, indent=1), encoding="utf-8")
