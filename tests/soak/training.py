"""Training with everything that may happen to it, over and over: interrupts, full disks, threads
beside it, copies, monitors and watches that come and go. Each round ends with nothing left."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import random
import re
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard.monitoring import Report
from tests.monitoring.writers.full_disk import full_disk
from tests.soak.interrupts import interrupted, listening
from tests.soak.models import batch, models
from tests.soak.neighbours import Neighbours
from tests.watching.left_behind import (
    nothing_in,
    nothing_in_the_process,
    nothing_in_the_thread,
    threads,
)

EVERY = 12
"""After so many rounds memory may grow no more, and is looked at as often."""
MOST_GROWTH = 64 * 2**20


def run(
    seconds: float, seed: int = 0, tell: Callable[[dict[str, int]], None] = lambda _: None
) -> dict[str, int]:
    """Rounds for so long, and what happened in them. The seed decides what is done in which order;
    when a signal comes, the machine."""
    choose, counts = random.Random(seed), Counter[str]()
    torch.manual_seed(seed)
    trained = [Trained(model) for model in models()]
    served, others = models(), models()
    with ExitStack() as around:
        around.enter_context(listening())
        said = around.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        folder = Path(around.enter_context(tempfile.TemporaryDirectory()))
        memory = Memory()
        end = time.monotonic() + seconds
        while not counts["rounds"] or time.monotonic() < end:
            before = threads()
            which = counts["rounds"] % len(trained)
            with Neighbours(trained[which].model, choose.choice(served), others, counts):
                Round(trained[which], folder, choose, counts).run()
            nothing_in_the_process()
            for model in (trained[which].model, *served, *others):
                nothing_in(model)
            assert threads() == before
            assert list(folder.iterdir()) == []
            _only_of_writing(said)
            counts["rounds"] += 1
            trained[which].rest()
            if counts["rounds"] % EVERY == 0:
                memory.check()
                tell(dict(counts))
    return dict(counts)


class Trained:
    """A model, and weights that only its optimiser changes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._weights: list[Tensor] | None = None

    def step(self) -> None:
        self.model(batch()).square().mean().backward()
        self.check()
        self._weights = None
        self._optimiser.step()
        self._weights = [p.detach().clone() for p in self.model.parameters()]
        self._optimiser.zero_grad()

    def rest(self) -> None:
        """Let go of what an interrupted step left in the model."""
        self._optimiser.zero_grad()

    def check(self) -> None:
        if self._weights is not None:
            for is_, was in zip(self.model.parameters(), self._weights, strict=True):
                assert torch.equal(is_, was)


class Round:
    """A monitor's life."""

    def __init__(
        self, trained: Trained, folder: Path, choose: random.Random, counts: Counter[str]
    ) -> None:
        self.trained, self.choose, self.counts = trained, choose, counts
        self.model, self.path = trained.model, folder / "run.jsonl"
        self.reports: list[int] = []
        self.interrupts = 0
        every = choose.randint(1, 4)
        self.monitor = regard.Monitor(
            self.model,
            every=every,
            look=choose.randint(1, every),
            to=choose.sample([self.path, self._hear, _fail], 3),
            qk_clip=choose.choice([None, 1e6]),
            rules=(),
        )

    def run(self) -> None:
        choose = self.choose
        try:
            for _ in range(choose.randint(2, 5)):
                if choose.random() < 0.3:
                    room = choose.choice([0, 100, 1000, 5000])
                    self.counts["disks full"] += 1
                    with full_disk(room):
                        self._some_steps()
                else:
                    self._some_steps()
                choose.choice([self._copy, self._watch, self._evaluate, self._watch_and_train])()
        finally:
            if choose.random() < 0.3:
                self._interrupt(self.monitor.close, choose.uniform(0, 0.003))
            self.monitor.close()
            self.trained.check()
            nothing_in(self.model)
        self._read()

    def _some_steps(self) -> None:
        if self.choose.random() < 0.6:
            self._interrupt(self._train, self.choose.uniform(0, 0.1))
            self.trained.check()
        else:
            self._train(self.choose.randint(1, 20))

    def _interrupt(self, work: Callable[[], Any], after: float) -> None:
        heard = interrupted(work, after)
        nothing_in_the_thread()
        self.interrupts += 1
        self.counts["interrupts"] += 1
        self.counts["interrupts heard"] += heard

    def _train(self, steps: int = 50) -> None:
        for _ in range(steps):
            self.trained.step()
            self.monitor.step()
            self.counts["steps"] += 1

    def _copy(self) -> None:
        make = self.choose.choice([copy.deepcopy, _pickled, _saved])
        twin = make(self.model)
        nothing_in(twin)
        for mine, its in zip(self.model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, its)
            assert mine.data_ptr() != its.data_ptr()
        twin(batch()).sum().backward()
        self.counts["copies"] += 1

    def _watch(self) -> None:
        """A watch that is attached, perhaps interrupted, and detached."""
        watch = regard.watch(self.model)
        seen = watch.attach()
        try:
            self._interrupt(lambda: self._train(3), self.choose.uniform(0, 0.02))
            self.trained.step()
            assert len(seen) == 2
        finally:
            if self.choose.random() < 0.5:
                self._interrupt(watch.detach, self.choose.uniform(0, 0.001))
            watch.detach()
        self.counts["watches"] += 1

    def _watch_and_train(self) -> None:
        def train() -> None:
            with regard.watch(self.model) as seen:
                self._train(3)
            assert len(seen) == 2

        self._interrupt(train, self.choose.uniform(0, 0.03))
        self.counts["watches"] += 1

    def _evaluate(self) -> None:
        self.model.eval()
        try:
            with torch.no_grad():
                self.model(batch())
        finally:
            self.model.train()
        self.counts["evaluations"] += 1

    def _hear(self, report: Report) -> None:
        self.reports.append(report.step)

    def _read(self) -> None:
        """Every line is whole, and every report is there once, however full the disk was."""
        steps = [json.loads(line)["step"] for line in self.path.read_text().splitlines()]
        assert steps == sorted(set(steps)), steps
        missing = set(self.reports) ^ set(steps)
        assert len(missing) <= self.interrupts, (steps, self.reports)
        self.counts["lines"] += len(steps)
        self.path.unlink()


class Memory:
    """What this process holds: no more than when it was looked at first."""

    def __init__(self) -> None:
        self._first: tuple[Counter[str], int] | None = None

    def check(self) -> None:
        alive, most = _alive(), _resident()
        if self._first is None:
            self._first = alive, most
        more = alive - self._first[0]
        assert not more, f"objects that were let go of are still there: {dict(more)}"
        assert most - self._first[1] < MOST_GROWTH, f"{most - self._first[1]:,} more bytes"


ROOMS = ("regard.seen", "regard.trace_files", "regard.watching", "regard.monitoring")


def _alive() -> Counter[str]:
    """Tensors, and objects of watching."""
    gc.collect()
    kinds = Counter(type(one) for one in gc.get_objects())
    return Counter(
        {
            f"{kind.__module__}.{kind.__name__}": count
            for kind, count in kinds.items()
            if issubclass(kind, Tensor) or str(kind.__module__).startswith(ROOMS)
        }
    )


def _resident() -> int:
    """The most bytes that were ever held at once."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _only_of_writing(said: list[warnings.WarningMessage]) -> None:
    """Writing fails on purpose; looking never does."""
    for warning in said:
        text = str(warning.message)
        if issubclass(warning.category, regard.errors.RegardWarning):
            assert re.search("while writing|while closing what|reports are lost", text), text
    said.clear()


def _fail(report: Report) -> None:
    raise ConnectionError(f"step {report.step}: nobody listens")


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
