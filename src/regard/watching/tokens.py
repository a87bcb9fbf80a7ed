"""What a model reads while it is watched: its tokens, and which runs go on with the same text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.watching.module_calls import stays

MARKS = "Ġ▁"
"""How vocabularies write the space before a word."""
BROKEN = "\ufffd"
"""What decoding gives for a part of a character."""
PART, MOST_PARTS = "⋯", 8
"""What such a part is shown as, and in how many of them texts are looked for."""


class Reading:
    """The ids of the text that a model is given, run by run.

    A run goes on with the text of the one before if it comes with a cache that is not empty, or
    repeats that text and adds to it: a step of generating. With another cache, which holds less
    than was read, it goes on with a part of that text, and is a text of its own.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise RegardError(
                "tokenizer= makes texts of ids",
                got=type(tokenizer).__name__,
                accepted="anything with decode(ids), such as the tokenizers of transformers",
            )
        self.tokenizer = tokenizer
        self.step = -1
        """The step of generating that the current run is; 0 where a text begins."""
        self._cache: int | None = None
        """Which cache the run before came with."""
        self._ids: Tensor | None = None
        self._whole: Tensor | None = None
        self._texts = 0

    def forget(self) -> None:
        """What was read before does not count any more."""
        self._texts = 0

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A run begins, with the arguments of the model."""
        whole, self._whole = self._whole, None
        cache, last = kwargs.get("past_key_values"), self._cache
        before, cached = self._ids, _cached(cache)
        self._cache = None if cache is None else id(cache)
        parted = last not in (None, self._cache) and before is not None and before.shape[1] > cached
        if whole is None:
            ids = _ids(kwargs.get("input_ids", args[0] if args else None))
            whole = _joined(before, cached, ids) if cached else ids
        goes_on = bool(cached) or _adds_to(before, whole)
        self.step = self.step + 1 if goes_on else 0
        if not goes_on or parted or not self._texts:
            self._texts += 1
        self._ids = None if whole is None else whole.clone()

    def listen(self, model: nn.Module) -> Callable[[], None]:
        """Be told the whole text before each step of `generate`, which gives the model only what is
        new, and may change places in the cache. Returns how to stop."""
        own = getattr(model, "prepare_inputs_for_generation", None)
        if own is None or self.tokenizer is None:
            return lambda: None
        there = vars(model).get("prepare_inputs_for_generation")

        def prepare(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._whole = input_ids
            return own(input_ids, *args, **kwargs)

        def stop() -> None:
            del model.prepare_inputs_for_generation
            if there is not None:
                vars(model)["prepare_inputs_for_generation"] = there

        kept = () if there is None else (there,)
        vars(model)["prepare_inputs_for_generation"] = stays(prepare, *kept)
        return stop

    def tokens(self) -> list[str] | list[list[str]] | None:
        """The texts of the tokens, a list for each sequence if there are several; None if they are
        not known, or if more than one text was read."""
        if self.tokenizer is None or self._ids is None or self._texts != 1:
            return None
        rows = [spelled(self.tokenizer, row) for row in self._ids.tolist()]
        return rows[0] if len(rows) == 1 else rows


def spelled(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token, with the space before it.

    A character that takes several tokens stands at the last of them, and ⋯ at those before. What is
    no text even so is shown as the vocabulary has it.
    """
    ids = list(ids)
    pieces = getattr(tokenizer, "convert_ids_to_tokens", lambda ids: [""] * len(ids))(ids)
    known: dict[int, str] = {}
    for i, piece in zip(ids, pieces, strict=True):
        if i not in known:
            known[i] = str(tokenizer.decode([i]))
            if piece and piece[0] in MARKS and known[i] and not known[i].startswith(" "):
                known[i] = f" {known[i]}"
    found: list[str] = []
    while len(found) < len(ids):
        at = len(found)
        text = known[ids[at]]
        if text and BROKEN not in text:
            found.append(text)
            continue
        together = _together(tokenizer, ids[at : at + MOST_PARTS]) if text else []
        found += together or [str(pieces[at]) if pieces[at] else text]
    return found


def with_spaces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The same, so that together they are the text: where a vocabulary writes no space before a
    word, as WordPiece, the one that decoding puts there; and no mark before what goes on a word."""
    tokens = spelled(tokenizer, ids)
    if any(token[:1].isspace() for token in tokens):
        return tokens
    found = tokens[:1]
    for i in range(1, len(tokens)):
        before, both = (str(tokenizer.decode(list(ids[i - 1 : end]))) for end in (i, i + 1))
        apart = BROKEN not in both and before and both.startswith(before)
        found.append(both[len(before) :] if apart else tokens[i])
    return found


def _together(tokenizer: Any, ids: list[int]) -> list[str]:
    """What the first tokens are that make a text together; nothing, if none do."""
    for count in range(2, len(ids) + 1):
        text = str(tokenizer.decode(ids[:count]))
        if text and BROKEN not in text:
            return [PART] * (count - 1) + [text]
    return []


def reads_two_texts(model: nn.Module) -> bool:
    """Whether a model has a text to read and another to write."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _ids(given: Any) -> Tensor | None:
    """[B, N] whole numbers, if that is what was given."""
    if not isinstance(given, Tensor) or given.ndim != 2:
        return None
    return None if given.is_floating_point() or given.dtype == torch.bool else given


def _cached(cache: Any) -> int:
    """How many tokens a cache holds."""
    length = getattr(cache, "get_seq_length", None)
    return 0 if length is None else int(length())


def _joined(before: Tensor | None, cached: int, ids: Tensor | None) -> Tensor | None:
    if before is None or ids is None or len(before) != len(ids) or before.shape[1] < cached:
        return None
    return torch.cat([before[:, :cached], ids], 1)


def _adds_to(before: Tensor | None, ids: Tensor | None) -> bool:
    if before is None or ids is None or len(before) != len(ids):
        return False
    n = before.shape[1]
    return ids.shape[1] > n and torch.equal(ids[:, :n], before)
