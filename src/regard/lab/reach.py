"""How far convolution, recurrence and attention reach, and what it costs them.

CLAIM: Between two positions n apart a signal passes n steps of a recurrence, n / (k - 1) layers of
a convolution and one layer of attention. So attention learns from far away where the others do not.
It pays with work that grows as n², all parallel, where a recurrence takes n steps in turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from statistics import linear_regression
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from regard import cost, masks
from regard.lab.apparatus.experiments import About, Check, Progress, Result, Tell, seeded
from regard.lab.apparatus.panels import Line, Lines
from regard.nn import EncoderBlock

ABOUT = About(
    name="reach",
    title="How far convolution, recurrence and attention reach",
    claim=(
        "Between two positions n apart a signal passes n steps of a recurrence, n / (k - 1) layers "
        "of a convolution of k taps, and one layer of attention. So attention learns from far away "
        "where the others do not. It pays with work that grows as n², all of it parallel, where a "
        "recurrence takes n steps one after another."
    ),
    method=(
        "The task: the first of a row of symbols is marked, and the last position has to name it. "
        "All symbols between are noise. One small model of each kind is trained for every "
        "distance, with the same number of steps: four layers of causal convolution with five "
        "taps, a GRU, and one block of attention (regard.nn, without positions: the mark says "
        "where to look).",
        "How far each can reach at all is measured as well: the gradient of the last output with "
        "respect to the first input, in a fresh model. Where it is exactly 0, no training helps.",
        "Work is the number of multiply–adds of one layer 64 wide: regard.cost counts attention's "
        "(projections, scores, weighted sum, output; all pairs), the others' follow from their "
        "matrices. Steps in turn are products that wait for each other. Time is that of a training "
        "step on one thread of this machine: the processor's, the least of several.",
    ),
    change=(
        "Give the convolution dilations 1, 4, 16, 64: its reach grows as a power of its depth.",
        "Train four times as long (steps=1600): how far does the GRU come?",
        "Swap nn.GRU for nn.RNN or nn.LSTM: which of them forgets first?",
        "Measure times on a GPU: the lines of attention and recurrence then cross elsewhere.",
    ),
    full={"distances": (4, 8, 16, 32, 64, 128, 256, 512), "steps": 1500,
          "lengths": (16, 32, 64, 128, 256, 512, 1024, 2048)},
)  # fmt: skip

SYMBOLS, WIDTH, BATCH, LAYERS, TAPS = 4, 32, 32, 4, 5
TIMED_WIDTH = 64
KINDS = ("convolution", "recurrence", "attention")


def run(
    *,
    seed: int = 0,
    distances: Sequence[int] = (4, 8, 16, 24, 32, 64, 128),
    steps: int = 400,
    lengths: Sequence[int] = (16, 32, 64, 128, 256, 512),
    progress: Tell | None = None,
) -> Result:
    """Train each kind at each distance, and time each at each length.

    >>> result = run(distances=(4,), steps=2, lengths=(8, 16))
    >>> result.numbers["path"]["convolution"], result.numbers["in_turn"]["recurrence"]
    ([1], [8, 16])
    """
    step = Progress(len(KINDS) * (len(distances) * steps + len(lengths)), progress)
    accuracy: dict[str, list[float]] = {kind: [] for kind in KINDS}
    gradient: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for distance in distances:
            with seeded(seed):
                model = Namer(kind, WIDTH)
                gradient[kind].append(influence(model, distance))
                accuracy[kind].append(train(model, distance, steps, lambda: step("training")))
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for n in lengths:
            with seeded(seed):
                seconds[kind].append(step_time(Namer(kind, TIMED_WIDTH), n))
            step("timing")
    numbers = {
        "distances": list(distances),
        "lengths": list(lengths),
        "accuracy": accuracy,
        "gradient": gradient,
        "path": {kind: [path(kind, n) for n in distances] for kind in KINDS},
        "work": {kind: [work(kind, n) for n in lengths] for kind in KINDS},
        "in_turn": {kind: [in_turn(kind, n) for n in lengths] for kind in KINDS},
        "seconds": seconds,
        "time_slope": {kind: _slope(lengths, seconds[kind]) for kind in KINDS},
        "parameters": {kind: sum(p.numel() for p in Namer(kind, WIDTH).parameters())
                       for kind in KINDS},
    }  # fmt: skip
    settings = {"seed": seed, "distances": list(distances), "steps": steps,
                "lengths": list(lengths)}  # fmt: skip
    return Result(ABOUT, settings, _checks(numbers), _answer(numbers), numbers, _panels(numbers))


class Namer(nn.Module):
    """Reads symbols, the marked ones apart, and names one at the last position."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(2 * SYMBOLS, width)
        self.mix = MAKERS[kind](width)
        self.name = nn.Linear(width, SYMBOLS)

    def forward(self, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b s"]:
        return self.named(self.symbol(ids))

    def named(self, x: Float[Tensor, "b n w"]) -> Float[Tensor, "b s"]:
        logits: Tensor = self.name(self.mix(x)[:, -1])
        return logits


class Convolution(nn.Module):
    """Layers in which each position sees itself and the taps before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(width, width, TAPS) for _ in range(LAYERS))

    def forward(self, x: Float[Tensor, "b n w"]) -> Float[Tensor, "b n w"]:
        x = x.mT
        for layer in self.layers:
            x = layer(pad(x, (TAPS - 1, 0))).relu()
        return x.mT


class Recurrence(nn.Module):
    """A GRU: each position sees the one before it, and through it all others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Float[Tensor, "b n w"]) -> Float[Tensor, "b n w"]:
        states: Tensor = self.cell(x)[0]
        return states


class Attention(nn.Module):
    """One block: each position sees all before it at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = EncoderBlock(width, 2, hidden=2 * width)

    def forward(self, x: Float[Tensor, "b n w"]) -> Float[Tensor, "b n w"]:
        mixed: Tensor = self.block(x, mask=masks.causal())
        return mixed


MAKERS: dict[str, Callable[[int], nn.Module]] = dict(
    zip(KINDS, (Convolution, Recurrence, Attention), strict=True)
)


def rows(batch: int, distance: int) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b"]]:
    """Symbols of which the first is marked, and the symbol that it is."""
    ids = torch.randint(SYMBOLS, (batch, distance + 1))
    right = ids[:, 0].clone()
    ids[:, 0] += SYMBOLS
    return ids, right


def train(model: Namer, distance: int, steps: int, done: Callable[[], None]) -> float:
    """Accuracy at a distance, after so many steps at that distance."""
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        learn(model, optimiser, distance, BATCH)
        done()
    ids, right = rows(512, distance)
    with torch.no_grad():
        return float((model(ids).argmax(-1) == right).float().mean())


def learn(model: Namer, optimiser: torch.optim.Optimizer, distance: int, batch: int) -> None:
    """One training step."""
    ids, right = rows(batch, distance)
    optimiser.zero_grad()
    cross_entropy(model(ids), right).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def influence(model: Namer, distance: int) -> float:
    """The gradient of the last output with respect to the first input, as a share of that with
    respect to the last."""
    ids, _ = rows(16, distance)
    # In float32 what fades would end at 0.
    exact = deepcopy(model).double()
    x = exact.symbol(ids).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(exact.named(x).square().sum(), x)
    sizes = gradient.norm(dim=-1).mean(0)
    return float(sizes[0] / sizes[-1])


def step_time(model: Namer, n: int, batch: int = 4, repeats: int = 5) -> float:
    """Seconds of the processor for a training step on rows of n symbols, the least of some."""
    optimiser = torch.optim.Adam(model.parameters())
    taken = []
    for _ in range(repeats + 2):
        start = time.process_time()
        learn(model, optimiser, n - 1, batch)
        taken.append(time.process_time() - start)
    return min(taken[2:])


def path(kind: str, distance: int) -> int:
    """Layers or steps that a signal passes between two positions.

    >>> path("convolution", 17), path("recurrence", 17), path("attention", 17)
    (5, 17, 1)
    """
    return {"convolution": -(-distance // (TAPS - 1)), "recurrence": distance, "attention": 1}[kind]


def work(kind: str, n: int, width: int = TIMED_WIDTH) -> int:
    """Multiply–adds of one layer over n positions.

    >>> work("convolution", 10, 4), work("recurrence", 10, 4), work("attention", 10, 4)
    (800, 960, 1440)
    """
    if kind == "attention":
        return cost.layer(width, 1, n).macs.dense
    return {"convolution": TAPS, "recurrence": 6}[kind] * n * width**2


def in_turn(kind: str, n: int) -> int:
    """Products of one layer that wait for each other."""
    return n if kind == "recurrence" else 1


def solved(accuracies: Sequence[float], distances: Sequence[int], enough: float = 0.95) -> int:
    """The farthest distance up to which all were solved; 0 if none was.

    >>> solved([1.0, 0.99, 0.5, 1.0], [4, 8, 16, 32])
    8
    """
    reached = 0
    for accuracy, distance in zip(accuracies, distances, strict=True):
        if accuracy < enough:
            break
        reached = distance
    return reached


def _slope(lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """The power of n as which time grows over the longer half of the lengths."""
    half = max(0, min(len(lengths) // 2, len(lengths) - 2))
    x, y = ([math.log(value) for value in values[half:]] for values in (lengths, seconds))
    return linear_regression(x, y).slope


def _checks(numbers: dict[str, Any]) -> tuple[Check, ...]:
    distances, gradient = numbers["distances"], numbers["gradient"]
    far = {kind: solved(numbers["accuracy"][kind], distances) for kind in KINDS}
    limit = LAYERS * (TAPS - 1)
    cut = [g == 0 for g in gradient["convolution"]]
    first = next((d for d, c in zip(distances, cut, strict=True) if c), None)
    work_at, turn = numbers["work"], numbers["in_turn"]
    grown = work_at["attention"][-1] / work_at["attention"][-2]
    lengths, slope = numbers["lengths"], numbers["time_slope"]
    doubled = lengths[-1] / lengths[-2]
    return (
        Check(
            f"{LAYERS} layers of convolution with {TAPS} taps reach {limit} positions and no "
            "further",
            f"gradient exactly 0 from {first} on; solved up to {far['convolution']}",
            cut == [d > limit for d in distances] and far["convolution"] <= limit,
        ),
        Check(
            "through a recurrence the signal fades",
            f"{gradient['recurrence'][-1]:.1e} of it is left after {distances[-1]} steps; through "
            f"attention {gradient['attention'][-1]:.1e}",
            gradient["recurrence"][-1] < 0.1 * gradient["attention"][-1],
        ),
        Check(
            "attention learns from farther away than both",
            ", ".join(f"{kind} up to {far[kind]}" for kind in KINDS),
            far["attention"] > max(far["convolution"], far["recurrence"]),
        ),
        Check(
            "attention's work grows faster than n, the others' as n",
            f"{doubled:g} times the length is {grown:.2f} times the work",
            grown > doubled
            and work_at["recurrence"][-1] == doubled * work_at["recurrence"][-2],
        ),
        Check(
            "a recurrence takes n steps in turn, and its time grows with them",
            f"{turn['recurrence'][-1]} in turn against {turn['attention'][-1]}; time grows as n to "
            f"the {slope['recurrence']:.1f}",
            turn["recurrence"][-1] == lengths[-1] and slope["recurrence"] > 0.7,
        ),
    )  # fmt: skip


def _answer(numbers: dict[str, Any]) -> str:
    distances, lengths, seconds = (numbers[k] for k in ("distances", "lengths", "seconds"))
    far = {kind: solved(numbers["accuracy"][kind], distances) for kind in KINDS}
    last = {kind: numbers["accuracy"][kind][-1] for kind in KINDS}
    gradient = {kind: numbers["gradient"][kind][-1] for kind in KINDS}
    ahead = [n for n, a, b in zip(lengths, seconds["attention"], seconds["recurrence"], strict=True)
             if a < b]  # fmt: skip
    quicker = f"at {', '.join(map(str, ahead))} symbols" if ahead else "at no length measured"
    return (
        "The marked symbol was found "
        + ", ".join(f"up to {far[kind]} positions away by {kind}" for kind in KINDS)
        + f" (at {distances[-1]}: "
        + ", ".join(f"{last[kind]:.0%}" for kind in KINDS)
        + f"; chance is {1 / SYMBOLS:.0%}). Before training, the first input moves the last output "
        f"{gradient['convolution']:.1g} (convolution), {gradient['recurrence']:.1g} (recurrence) "
        f"and {gradient['attention']:.1g} (attention) times as much as the last input does at "
        "that distance. "
        f"At {lengths[-1]} positions a layer {TIMED_WIDTH} wide takes "
        + ", ".join(f"{numbers['work'][kind][-1] / 1e6:.0f} M" for kind in KINDS)
        + " multiply–adds, in the same order, and a training step "
        + ", ".join(f"{1e3 * seconds[kind][-1]:.0f} ms" for kind in KINDS)
        + " on one thread here; attention is quicker than the recurrence "
        f"{quicker}. One thread does everything in turn: on a device that does much at once "
        "the steps in turn decide."
    )


def _panels(numbers: dict[str, Any]) -> tuple[Lines, ...]:
    distances, lengths = numbers["distances"], numbers["lengths"]

    def lines(what: str, x: Sequence[int], times: float = 1.0) -> list[Line]:
        return [Line(kind, x, [times * y for y in numbers[what][kind]]) for kind in KINDS]

    reached = [
        Line(kind, distances[: len(kept)], kept)
        for kind in KINDS
        if (kept := [g for g in numbers["gradient"][kind] if g > 0])
    ]
    return (
        Lines(
            "The marked symbol is named", "The convolution stops at its sixteenth position.",
            "distance", "accuracy", lines("accuracy", distances), log_x=True, percent=True,
        ),
        Lines(
            "What of a far input arrives, untrained",
            "Gradient with respect to the first input over that to the last. A line ends where it "
            "is exactly 0.",
            "distance", "share of the gradient", reached, log_x=True, log_y=True,
        ),
        Lines(
            "Path between two positions", "Layers or steps that a signal has to pass.",
            "distance", "layers or steps", lines("path", distances), log_x=True, log_y=True,
        ),
        Lines(
            f"Work of a layer {TIMED_WIDTH} wide",
            "Attention does more than the recurrence from about as many positions as it is wide.",
            "positions n", "multiply–adds, millions", lines("work", lengths, 1e-6),
            log_x=True, log_y=True,
        ),
        Lines(
            "Steps in turn", "What cannot be done at once, however many processors there are.",
            "positions n", "steps", lines("in_turn", lengths), log_x=True, log_y=True,
        ),
        Lines(
            "Time of a training step, one thread", "Rows of n symbols, four at once.",
            "positions n", "milliseconds", lines("seconds", lengths, 1e3), log_x=True, log_y=True,
        ),
    )  # fmt: skip
