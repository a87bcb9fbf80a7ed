"""What every experiment has in common: what it says of itself, what it gives back, its seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch

from regard.display import Displayed
from regard.errors import RegardError
from regard.files import finite_or_null
from regard.lab.apparatus.panels import Panel

NAMES = (
    "tour",
    "bottleneck",
    "scaling",
    "roles",
    "words",
    "heads",
    "faithfulness",
    "reach",
    "order",
    "domains",
    "cost",
    "counting",
)
"""The experiments, in the order in which they are best read; each is a module of `regard.lab`."""

Tell = Callable[[str, int, int], None]
"""Is told what is being done, and how much of all is done."""


@dataclass(frozen=True)
class About:
    """What an experiment says of itself before it runs. Texts are plain sentences."""

    name: str
    title: str
    claim: str
    method: tuple[str, ...]
    """What is done, a paragraph each."""
    change: tuple[str, ...]
    """What to change next, a sentence each."""
    full: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `run` for the long form."""
    seeds: int = 1
    """With how many seeds `regard lab` runs it unless told: three where that takes about three
    minutes of one core."""
    takes: str = ""
    """About how long a run with one seed takes, where that is more than three minutes of one
    core."""


class Check(NamedTuple):
    """One part of a claim: what it says, what was found, and whether that supports it."""

    says: str
    found: str
    holds: bool


@dataclass(frozen=True, repr=False)
class Result(Displayed):
    """What came out. As the last line of a notebook's cell it draws its panels.

    >>> about = About("toy", "A toy", "One is less than two.", (), ())
    >>> checks = (Check("1 < 2", "1 and 2", True), Check("2 < 1", "2 and 1", False))
    >>> Result(about, {"seed": 0}, checks, "They differ by 1.", {"difference": 1}, ())
    Not all of it is supported: "2 < 1" does not hold (2 and 1). They differ by 1.
    """

    about: About
    settings: Mapping[str, Any]
    """The seed and the sizes it ran with."""
    checks: tuple[Check, ...]
    answer: str
    """One paragraph, with figures."""
    numbers: Mapping[str, Any]
    """All of them, as JSON can hold it."""
    panels: tuple[Panel, ...]

    @property
    def supported(self) -> bool:
        """Whether every part of the claim holds."""
        return all(check.holds for check in self.checks)

    @property
    def verdict(self) -> str:
        """Whether the result supports the claim, and which parts it does not."""
        if self.supported:
            return "The result supports the claim."
        which = "; ".join(
            f'"{c.says}" does not hold ({c.found})' for c in self.checks if not c.holds
        )
        some = any(check.holds for check in self.checks)
        return f"{'Not all of it' if some else 'None of it'} is supported: {which}."

    def json(self) -> str:
        """The claim, the verdict and the numbers; what is not finite is null."""
        whole = {
            "experiment": self.about.name,
            "claim": self.about.claim,
            "supported": self.supported,
            "answer": self.answer,
            "checks": [check._asdict() for check in self.checks],
            "settings": dict(self.settings),
            "numbers": finite_or_null(self.numbers),
        }
        return json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False)

    def __repr__(self) -> str:
        return f"{self.verdict} {self.answer}"


@dataclass(frozen=True)
class Experiment:
    """An experiment that can be run."""

    about: About
    run: Callable[..., Result]


def experiment(name: str) -> Experiment:
    """The experiment of a name.

    >>> experiment("scaling").about.title
    'Why scores are divided by √d'
    """
    if name not in NAMES:
        raise RegardError(
            "there is no experiment of that name", got=repr(name), accepted=", ".join(NAMES)
        )
    module = import_module(f"regard.lab.{name}")
    return Experiment(module.ABOUT, module.run)


class Progress:
    """Counts steps of a known total, and reports them to a callback.

    >>> step = Progress(2, lambda what, done, total: print(f"{what}: {done} of {total}"))
    >>> step("training")
    training: 1 of 2
    """

    def __init__(self, total: int, tell: Tell | None) -> None:
        self.done, self.total, self._tell = 0, total, tell

    def __call__(self, what: str, steps: int = 1) -> None:
        """A step is done, or what takes as long as several."""
        self.done += steps
        if self._tell is not None:
            self._tell(what, self.done, self.total)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the same numbers every time, and leave the caller's generator as it was.

    On one thread: sums come out alike on every machine, and tensors this small gain by no second.
    Numbers below 1e-38 count as 0: a saturated softmax is full of them, and a CPU takes ten times
    as long for each.

    >>> with seeded(3):
    ...     first = torch.rand(1)
    >>> with seeded(3):
    ...     assert torch.rand(1) == first
    """
    threads, flushed = torch.get_num_threads(), not torch.tensor(1e-40).mul(1.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        try:
            yield
        finally:
            torch.set_flush_denormal(flushed)
            torch.set_num_threads(threads)
