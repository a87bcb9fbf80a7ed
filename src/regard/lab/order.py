"""What attention knows of order, and what positions add.

CLAIM: Attention without positions is a function of a set: permuted inputs give permuted outputs, so
it cannot tell what came first. Sinusoidal, learned and rotary positions mend that; ALiBi does with
a causal mask. Past the longest text of training the first three break down, and ALiBi goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard import biases, masks
from regard.biases.alibi import slopes
from regard.biases.bias import Bias
from regard.lab.apparatus.experiments import About, Check, Progress, Result, Tell, seeded
from regard.lab.apparatus.panels import Bars, Line, Lines
from regard.lab.material.text import Corpus
from regard.masks import Mask
from regard.nn import EncoderBlock, MultiHeadAttention, Rotary

ABOUT = About(
    name="order",
    title="What attention knows of order, and what positions add",
    claim=(
        "Attention without positions is a function of a set: permute its inputs and its outputs "
        "are permuted alike, so it cannot tell what came first. Sinusoidal, learned and rotary "
        "positions mend that; ALiBi, which says how far and not in which direction, does so "
        "together with a causal mask. Past the longest text of training the first three break "
        "down, and ALiBi goes on."
    ),
    method=(
        "First no training: a layer of attention reads a row of vectors and the same row permuted, "
        "in float64. If it is a function of a set, the outputs are the same but for their order. "
        "The same with each kind of position added, and with a causal mask and no positions.",
        "Then a model of one block is asked which of two marked symbols comes first in a row, "
        "without a mask and, for what then fails, with a causal one. Last, a causal language "
        "model of two blocks reads the King James Bible letter by letter in windows of one length, "
        "once with each kind of position, and is tested on windows up to eight times as long. The "
        "learned table has rows for the longest; those beyond the length of training were never "
        "trained. The loss is that of the last letters of a window, which have the most to look "
        "back on.",
        "Without positions a causal model still knows some order: the first place sees one token, "
        "the second two. It is trained beside the others.",
    ),
    change=(
        "Train on windows of half and twice the length: does the place of the break move along?",
        "Give Rotary a base of 500: which lengths become better, which worse?",
        "Shift sinusoids by a random number in training, so that all of them are seen.",
        "Mask the test to a window of the training length (masks.causal() & masks.window(n)): what "
        "breaks then?",
    ),
    full={"length": 128, "steps": 2500, "sort_steps": 1500},
)  # fmt: skip

KINDS = ("none", "sinusoidal", "learned", "rotary", "ALiBi")
ALONE = ("sinusoidal", "learned", "rotary")
MASKED = {"none, causal": ("none", masks.causal()), "ALiBi, causal": ("ALiBi", masks.causal())}
WIDTH, HEADS, TIMES = 64, 4, (1, 2, 4, 8)
ROW, SYMBOLS = 16, 8


def run(
    *,
    seed: int = 0,
    length: int = 48,
    steps: int = 350,
    sort_steps: int = 250,
    batch: int = 24,
    progress: Tell | None = None,
) -> Result:
    """Permute untrained layers, train for order, and read on past the length of training."""
    step = Progress(len(KINDS) * steps + (len(KINDS) + len(MASKED)) * sort_steps, progress)
    with seeded(seed):
        moved = {kind: unordered(kind) for kind in KINDS}
        moved["none, causal"] = unordered("none", masks.causal())
    told = {kind: (kind, None) for kind in KINDS} | MASKED
    first: dict[str, float] = {}
    losses: dict[str, list[float]] = {}
    for name, (kind, mask) in told.items():
        with seeded(seed):
            first[name] = told_apart(kind, mask, sort_steps, lambda: step("which came first"))
    for kind in KINDS:
        with seeded(seed):
            model = Speller(kind, TIMES[-1] * length)
            losses[kind] = read_on(model, length, steps, batch, lambda: step("reading"))
    numbers = {
        "moved": moved,
        "first": first,
        "lengths": [times * length for times in TIMES],
        "loss": losses,
    }
    settings = {"seed": seed, "length": length, "steps": steps, "sort_steps": sort_steps,
                "batch": batch}  # fmt: skip
    return Result(ABOUT, settings, _checks(numbers), _answer(numbers), numbers, _panels(numbers))


class Positions(nn.Module):
    """One kind of position: what is added to the inputs, to queries and keys, or to scores."""

    def __init__(self, kind: str, longest: int) -> None:
        super().__init__()
        self.kind = kind
        self.rotary = Rotary() if kind == "rotary" else None
        self.table = nn.Embedding(longest, WIDTH) if kind == "learned" else None
        if self.table is not None:
            nn.init.normal_(self.table.weight, std=0.3)

    def added(self, x: Float[Tensor, "b n w"]) -> Float[Tensor, "b n w"]:
        """The inputs with their positions."""
        if self.table is not None:
            return x + self.table.weight[: x.shape[1]].to(x)
        return x + 0.3 * sinusoids(x.shape[1]).to(x) if self.kind == "sinusoidal" else x

    @property
    def bias(self) -> Bias | None:
        """What is added to the scores."""
        return biases.alibi(slopes(HEADS)) if self.kind == "ALiBi" else None


def sinusoids(n: int, width: int = WIDTH) -> Float[Tensor, "n w"]:
    """Sines and cosines of each position, from quick to slow, as in the first transformer.

    >>> sinusoids(2, 4)
    tensor([[0.0000, 0.0000, 1.0000, 1.0000],
            [0.8415, 0.0100, 0.5403, 0.9999]])
    """
    rate = 10_000.0 ** -(torch.arange(0, width, 2) / width)
    angle = torch.arange(n)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], 1)


@torch.no_grad()
def unordered(kind: str, mask: Mask | None = None, n: int = 64) -> float:
    """How much a permutation of the inputs changes what a layer gives each, as a share of it."""
    positions = Positions(kind, n)
    layer = MultiHeadAttention(WIDTH, HEADS, rotary=positions.rotary).double()
    x, order = torch.randn(1, n, WIDTH, dtype=torch.float64), torch.randperm(n)
    bias = None if positions.bias is None else biases.alibi(slopes(HEADS).double())
    plain = layer(positions.added(x), mask=mask, bias=bias)
    mixed = layer(positions.added(x[:, order]), mask=mask, bias=bias)
    return float((mixed - plain[:, order]).norm() / plain.norm())


def told_apart(kind: str, mask: Mask | None, steps: int, done: Callable[[], None]) -> float:
    """How often a trained block says rightly which of two marked symbols came first."""
    positions = Positions(kind, ROW)
    symbol, block = nn.Embedding(SYMBOLS, WIDTH), EncoderBlock(WIDTH, HEADS, hidden=WIDTH,
                                                               rotary=positions.rotary)  # fmt: skip
    answer = nn.Linear(WIDTH, 2)
    parts = nn.ModuleList([positions, symbol, block, answer])
    optimiser = torch.optim.Adam(parts.parameters(), lr=3e-3)

    def say(ids: Int[Tensor, "b n"]) -> Tensor:
        mixed = block(positions.added(symbol(ids)), mask=mask, bias=positions.bias)
        said: Tensor = answer(mixed.mean(1))
        return said

    for _ in range(steps):
        ids, right = marked_rows(64)
        optimiser.zero_grad()
        cross_entropy(say(ids), right).backward()
        optimiser.step()
        done()
    ids, right = marked_rows(1024)
    with torch.no_grad():
        return float((say(ids).argmax(-1) == right).float().mean())


def marked_rows(batch: int) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b"]]:
    """Rows in which symbols 0 and 1 stand once, and whether 1 stands first."""
    ids = torch.randint(2, SYMBOLS, (batch, ROW))
    places = torch.rand(batch, ROW).argsort(1)[:, :2]
    ids.scatter_(1, places, torch.tensor([0, 1]).expand(batch, 2))
    return ids, (places[:, 1] < places[:, 0]).long()


class Speller(nn.Module):
    """A causal model of letters."""

    def __init__(self, kind: str, longest: int) -> None:
        super().__init__()
        letters = len(Corpus.letters().names)
        self.positions = Positions(kind, longest)
        self.letter = nn.Embedding(letters, WIDTH)
        nn.init.normal_(self.letter.weight, std=0.3)
        self.blocks = nn.ModuleList(
            EncoderBlock(WIDTH, HEADS, hidden=2 * WIDTH, rotary=self.positions.rotary)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.next = nn.Linear(WIDTH, letters)

    def forward(self, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n v"]:
        x = self.positions.added(self.letter(ids))
        for block in self.blocks:
            x = block(x, mask=masks.causal(), bias=self.positions.bias)
        logits: Tensor = self.next(self.norm(x))
        return logits


def read_on(
    model: Speller, length: int, steps: int, batch: int, done: Callable[[], None]
) -> list[float]:
    """Train on windows of one length; the loss a letter at the end of longer ones."""
    ids = Corpus.letters().ids
    cut = len(ids) * 9 // 10
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda i: min(1.0, (i + 1) / 30) * (1 - 0.9 * i / max(1, steps))
    )
    for _ in range(steps):
        window = _windows(ids[:cut], batch, length)
        optimiser.zero_grad()
        logits = model(window[:, :-1])
        cross_entropy(logits.mT, window[:, 1:]).backward()
        optimiser.step()
        rates.step()
        done()
    return [_end_loss(model, ids[cut:], times * length, length // 2) for times in TIMES]


@torch.no_grad()
def _end_loss(model: Speller, ids: Int[Tensor, "all"], length: int, last: int) -> float:
    window = _windows(ids, 96, length)
    logits = model(window[:, :-1])[:, -last:]
    return float(cross_entropy(logits.mT, window[:, -last:]))


def _windows(ids: Int[Tensor, "all"], count: int, length: int) -> Int[Tensor, "b n"]:
    starts = torch.randint(len(ids) - length, (count, 1))
    return ids[starts + torch.arange(length + 1)]


def _checks(numbers: dict[str, Any]) -> tuple[Check, ...]:
    moved, first, loss = numbers["moved"], numbers["first"], numbers["loss"]
    with_some = [kind for kind in KINDS if kind != "none"]
    worse = {kind: loss[kind][-1] - loss[kind][0] for kind in KINDS}
    return (
        Check(
            "without positions, permuted inputs give permuted outputs exactly",
            f"they differ by {moved['none']:.0e} of their size, float64's rounding; with positions "
            f"by {min(moved[kind] for kind in with_some):.2f} or more",
            moved["none"] < 1e-14 and min(moved[kind] for kind in with_some) > 1e-3,
        ),
        Check(
            "so without positions it cannot say which came first",
            f"right in {first['none']:.0%} of rows",
            abs(first["none"] - 0.5) < 0.07,
        ),
        Check(
            "with sinusoidal, learned or rotary positions it can",
            ", ".join(f"{kind} {first[kind]:.0%}" for kind in ALONE),
            min(first[kind] for kind in ALONE) > 0.9,
        ),
        Check(
            "ALiBi cannot alone, but with a causal mask",
            f"{first['ALiBi']:.0%} alone, {first['ALiBi, causal']:.0%} with the mask",
            abs(first["ALiBi"] - 0.5) < 0.07 and first["ALiBi, causal"] > 0.9,
        ),
        Check(
            "past the length of training, sinusoidal, learned and rotary positions break down",
            ", ".join(f"{kind} {worse[kind]:+.2f}" for kind in ALONE)
            + f" nats a letter at {TIMES[-1]} times the length",
            min(worse[kind] for kind in ALONE) > 0.2,
        ),
        Check(
            "ALiBi goes on",
            f"{worse['ALiBi']:+.2f} nats",
            worse["ALiBi"] < 0.05,
        ),
    )


def _answer(numbers: dict[str, Any]) -> str:
    moved, first, loss = numbers["moved"], numbers["first"], numbers["loss"]
    short, long = numbers["lengths"][0], numbers["lengths"][-1]
    at = {kind: f"{kind} {loss[kind][0]:.2f} → {loss[kind][-1]:.2f}" for kind in KINDS}
    return (
        "Permuting the inputs of a layer without positions changes its outputs by "
        f"{moved['none']:.0e} of their size, which is rounding; with a causal mask alone by "
        f"{moved['none, causal']:.2f}, with positions by {min(moved[k] for k in KINDS[1:]):.2f} to "
        f"{max(moved[k] for k in KINDS[1:]):.2f}. Which of two symbols came first is told "
        "rightly in "
        + ", ".join(f"{share:.0%} ({name})" for name, share in first.items())
        + f" of rows. Trained to read {short} letters and tested at {long}, the loss a letter "
        "goes: "
        + ", ".join(at.values())
        + " nats. Without positions the causal mask still says how many tokens came before, which "
        "is why that model reads at all."
    )


def _panels(numbers: dict[str, Any]) -> tuple[Lines | Bars, ...]:
    moved, lengths = numbers["moved"], numbers["lengths"]
    kinds = list(moved)
    return (
        Bars(
            "What a permutation changes", "0 is a function of a set. No training.",
            "change of the output", kinds, {"change": [moved[kind] for kind in kinds]},
        ),
        Bars(
            "Which came first?",
            "Half is chance. ALiBi alone says how far, not in which direction.",
            "accuracy", list(numbers["first"]), {"right": list(numbers["first"].values())},
            percent=True,
        ),
        Lines(
            "Reading past the length of training",
            f"Loss of the last letters. Trained on {lengths[0]}; lower is better.",
            "letters read", "loss, nats a letter",
            [Line(kind, lengths, numbers["loss"][kind]) for kind in KINDS], log_x=True,
        ),
    )  # fmt: skip
