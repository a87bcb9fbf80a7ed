"""Let a trained causal model read longer texts: go on training it, gently, on long windows.

    python -m models.train.carried
    python -m models.train.sample --minutes 0.9 --seed 1 --teacher models/data/carried \\
        --tokenizer src/regard/models/embedded/regard-small/tokenizer.json \\
        --out models/data/carried/stories.safetensors
    python -m models.train.lengthen --minutes 4

Rotary positions have no weights, so that nothing is added to the model: it learns what distances
mean that it never saw. Windows of all lengths are mixed, each step as many tokens, so that short
texts stay what they were. Writes the model to models/data/regard-long, with a card that says what
a token far from the beginning gains from all that stands before it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.train.carried import CARRIED
from models.train.causal import Windows, copied, held_losses, loss_of, samples
from models.train.corpus import DATA
from models.train.positions import by_position, far_repeats
from models.train.training import Training, device_of, options
from regard import RegardError
from regard.models.causal import CausalModel
from regard.models.folder import read, save
from regard.models.named_models import EMBEDDED
from regard.models.tokenizer import Tokenizer

LONG = {"stories": 0.5, "books": 0.3, "bibles": 0.2}
"""Where windows longer than the model could read come from. Stories are short: what is far away in
a window of many helps little. Books are truly long."""
REPEATS = 1 / 16
"""The share of long windows that say random tokens over and over, so that what was said once is
found again from far away too."""
LENGTHS = {512: 0.15, 1024: 0.15, 2048: 0.2, 4096: 0.5}
"""How many of the steps read windows how long."""


class Lengths:
    """Windows of several lengths, one of them a step, each step as many tokens."""

    def __init__(self, windows: dict[int, Windows], chances: list[float], tokens: int) -> None:
        self.windows, self.tokens = windows, tokens
        self.chances = torch.tensor(chances)

    def draw(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        """[tokens / length, length] ids, and what follows each."""
        generator = torch.Generator().manual_seed(seed * 7_368_787 + step)
        chosen = int(torch.multinomial(self.chances, 1, generator=generator))
        length = list(self.windows)[chosen]
        return self.windows[length].draw(step, max(1, self.tokens // length), seed)


def opened(folder: Path, longest: int, device: torch.device) -> tuple[CausalModel, Tokenizer]:
    """The model that is there, allowed to read more than it learned to."""
    model, tokenizer = read(folder, device)
    if not isinstance(model, CausalModel):
        raise RegardError(
            "only a causal model can be lengthened",
            got=f"{folder}: {type(model).__name__}",
            accepted="a folder that models/train/causal.py wrote",
        )
    model.config = replace(model.config, longest=longest)
    return model, tokenizer


def mixture(streams: dict[str, Tensor], given: argparse.Namespace, device: torch.device) -> Lengths:
    """Windows of each length; those the model could read before come from where they came from."""
    windows = {
        n: Windows(streams, n, device)
        if n <= given.known
        else Windows(streams, n, device, LONG, REPEATS)
        for n in given.lengths
    }
    return Lengths(windows, [LENGTHS.get(n, 1.0) for n in given.lengths], given.tokens)


def validated(model: CausalModel, lengths: Lengths, count: int = 8) -> dict[str, float]:
    """Losses on held-out text in the shortest and the longest windows."""
    found = {}
    for n in sorted({min(lengths.windows), max(lengths.windows)}):
        losses = held_losses(model, lengths.windows[n], count * max(lengths.windows) // n)
        found |= {f"{name} at {n}": loss for name, loss in losses.items()}
    return found


def card_of(
    model: CausalModel, old: CausalModel, lengths: Lengths, training: Training, source: Path
) -> dict[str, Any]:
    """The card of the model as it was, with what it learned since. What was measured of its heads
    is left out: heads.py measures again."""
    card = json.loads((source / "card.json").read_text())
    measured = ("heads", "scores", "badges", "repeated tokens")
    card = {name: value for name, value in card.items() if name not in measured}
    longest, known = lengths.windows[max(lengths.windows)], training.given.known
    short = Windows(longest.streams, known, longest.device)
    data = {name: f"{len(longest.streams[name]):,} tokens, {share:.0%} of the long windows"
            for name, share in LONG.items()}  # fmt: skip
    data["repeats"] = f"{REPEATS:.1%} of them say random tokens over and over"
    steps = training.facts() | {"lengths": list(lengths.windows)}
    lengthened = {
        "from": known,
        "to": longest.size,
        "data": data,
        "training": steps | {"tokens": training.done * lengths.tokens},
        f"loss at {known} before": held_losses(old, short),
        f"loss at {longest.size}": held_losses(model, longest),
        "loss by position": by_position(model, old, longest, known),
        "repeated tokens far apart": {
            "before": far_repeats(old, longest), "now": far_repeats(model, longest),
        },
    }  # fmt: skip
    return card | {"loss": held_losses(model, short), "lengthened": lengthened}


def trained(
    model: CausalModel, plain: CausalModel, lengths: Lengths, given: argparse.Namespace
) -> Training:
    training = Training(model, given)
    if given.compile:
        for block in model.blocks:
            block.compile()
    training.run(
        lambda step: loss_of(model, *lengths.draw(step, given.seed)),
        lambda: validated(copied(model, plain), lengths, 2),
    )
    training.finish()
    return training


def chosen(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = EMBEDDED / "regard-small"
    parser.add_argument("--source", type=Path, default=source, help="the model to go on with")
    parser.add_argument("--data", type=Path, default=CARRIED, help="texts and stories as ids")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--tokens", type=int, default=1 << 16, help="tokens a step")
    parser.add_argument("--compile", action="store_true", help="the blocks, with torch.compile")
    options(parser, rate=3e-4, save_every=500, out=DATA / "regard-long")
    given = parser.parse_args(arguments)
    given.batch = f"{given.tokens} tokens"
    given.known = json.loads((given.source / "config.json").read_text())["longest"]
    if max(given.lengths) <= given.known:
        raise RegardError(
            "nothing to learn: the model reads texts as long as that",
            got=f"--lengths {' '.join(map(str, given.lengths))}, for {given.known} tokens",
            accepted=f"at least one length above {given.known}",
        )
    return given


def main(arguments: list[str] | None = None) -> None:
    given = chosen(arguments)
    device, longest = device_of(given), max(given.lengths)
    model, tokenizer = opened(given.source, longest, device)
    old, plain = (opened(given.source, longest, device)[0] for _ in range(2))
    files = [load_file(given.data / f"{name}.safetensors") for name in ("texts", "stories")]
    streams = files[0] | files[1]
    print(", ".join(f"{n} {len(ids) / 1e6:.2f} M" for n, ids in streams.items()), flush=True)
    lengths = mixture(streams, given, device)
    training = trained(model, plain, lengths, given)
    save(model, given.out)
    shutil.copy(given.source / "tokenizer.json", given.out)
    card = card_of(copied(model, plain), old, lengths, training, given.source)
    card["samples"] = samples(plain, tokenizer)
    (given.out / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({"loss": card["loss"], **card["lengthened"]}, indent=1))
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
