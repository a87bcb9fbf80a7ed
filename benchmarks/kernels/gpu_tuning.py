"""Which settings of the kernels are fastest on this GPU, among those that give the right answer.

Nothing here runs in a user's process: what it finds is written into
regard.backends.triton.settings.tuning by hand.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernels.gpu_cases import TOKENS, kind
from benchmarks.kernels.gpu_checks import THIS, Command, run_all
from benchmarks.kernels.gpu_setup import Setup, checked
from regard import masks
from regard.backends.operators import Pull
from regard.backends.triton import backward, forward
from regard.backends.triton.questions import second_pass
from regard.backends.triton.settings.tuning import (
    Forward,
    Looking,
    backward_settings,
    fits_hopper,
    forward_settings,
    looking_settings,
)
from regard.inputs import AttentionInputs

LENGTHS = (2048, 16384)
CELLS = 256
Answers = dict[str, Tensor]


@dataclass(frozen=True)
class Sort:
    """Calls that share their settings: a kernel, a head width, masked or not.

    The kernels are forward; keys and queries, of the backward pass; received and map."""

    kernel: str
    width: int
    causal: bool

    def __str__(self) -> str:
        return f"{self.kernel}:{self.width}:{kind(self.causal)}"

    @staticmethod
    def parse(text: str) -> Sort:
        kernel, width, mask = text.split(":")
        return Sort(kernel, int(width), mask == "causal")

    @property
    def heads(self) -> int:
        return 2048 // self.width

    def work(self, n: int) -> float:
        """FLOPs of a call: two products forward, seven in both kernels backward, one to look."""
        products = {"forward": 2, "keys": 7, "queries": 7}.get(self.kernel, 1)
        pairs = n * (n + 1) / 2 if self.causal else n * n
        return 2.0 * products * (TOKENS // n) * self.heads * self.width * pairs


def sorts(kernels: str) -> list[Sort]:
    """What is asked for: kernels by name, or single sorts like forward:64:causal."""
    parts = {"backward": ["keys", "queries"], "looking": ["received", "map"]}
    found = []
    for asked in kernels.split(","):
        if ":" in asked:
            found.append(Sort.parse(asked))
        else:
            names = parts.get(asked, [asked])
            found += [Sort(*each) for each in product(names, (64, 128, 256), (False, True))]
    unknown = {sort.kernel for sort in found} - {"forward", "keys", "queries", "received", "map"}
    if unknown:
        sys.exit(f"no kernel {unknown.pop()!r} to tune; there are forward, backward and looking")
    return found


def grid(sort: Sort, x: AttentionInputs) -> list[Any]:
    """The settings to try, those in use first."""
    widest = 64 if sort.width > 128 else 128
    if sort.kernel == "forward":
        tried: list[Any] = [forward_settings(x, statistics=True)]
        for rows, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
            if keys <= widest:
                tried.append(Forward(rows, keys, warps, stages, described=True))
        if fits_hopper(x):
            for keys, stages in product((64, 128), (2, 3)):
                tried.append(Forward(128, keys, stages=stages, hopper=True))
            for stages, registers in product((2, 3), (None, 168)):
                few = Forward(64, 128, 4, stages, described=True)
                tried.append(replace(few, registers=registers))
    elif sort.kernel in ("keys", "queries"):
        now = backward_settings(x)
        side, tried = getattr(now, sort.kernel), [now]
        sizes = [(32, 64), (64, 64), (32, 128), (64, 128), (128, 128)]
        for (few, many), warps, stages in product(sizes, (4, 8), (1, 2, 3)):
            # The larger side of a tile is the one that its kernel owns.
            rows, keys = (few, many) if sort.kernel == "keys" else (many, few)
            if many <= widest:
                tile = replace(side, rows=rows, keys=keys, warps=warps, stages=stages)
                tried.append(replace(now, **{sort.kernel: tile}))
    else:
        tried = [looking_settings(x)]
        for rows, keys, warps, stages in product((64, 128), (64, 128), (4, 8), (2, 3, 4)):
            tried.append(Looking(rows, keys, warps, stages))
        if fits_hopper(x):
            tried.append(Looking(128, 64, hopper=True))
    return list(dict.fromkeys(tried))


@dataclass(frozen=True)
class Trial:
    """One call to be run with different settings."""

    sort: Sort
    inputs: AttentionInputs
    pull: Tensor

    @staticmethod
    def make(setup: Setup, sort: Sort, n: int) -> Trial:
        shape = TOKENS // n, setup.heads(sort.heads), setup.length(n), sort.width
        q, k, v, pull = setup.tensors(*shape, count=4)
        return Trial(sort, checked(q, k, v, masks.causal() if sort.causal else None), pull)

    def runner(self) -> Callable[[Any], Callable[[], Answers]]:
        """From settings to a run that gives named answers."""
        x = self.inputs
        rows, kept = forward.run(x, forward_settings(x, statistics=True), statistics=True)
        # A loss of lse as well keeps the call from being handed to PyTorch's backward pass.
        pull = Pull(self.pull, torch.zeros_like(rows.lse), None)
        cells = (min(CELLS, x.shape.Q),) * 2

        def with_settings(how: Any) -> Callable[[], Answers]:
            # It keeps how it answered first.
            second = second_pass.TritonPass()

            def ahead() -> Answers:
                got, _ = forward.run(x, how, statistics=True)
                return {"out": got.out, "lse": got.lse, "entropy": got.entropy}

            def back() -> Answers:
                with patch.object(backward, "backward_settings", lambda x: how):
                    given = backward.backward(x, rows, kept, pull, bias=False)
                return {"q": given.q, "k": given.k, "v": given.v}

            def look() -> Answers:
                with patch.object(second_pass, "looking_settings", lambda x: how):
                    if self.sort.kernel == "received":
                        return {"received": second.received(x, rows.lse)}
                    everything = (0, x.shape.Q)
                    got = second.pooled(x, rows.lse, cells, everything, everything, "sum")
                    return {"map": got}

            return {"forward": ahead, "keys": back, "queries": back}.get(self.sort.kernel, look)

        return with_settings

    def formula(self, dtype: torch.dtype) -> Answers:
        """The first head as the formula says it, every operation in one precision."""
        q, k, v = (t[0, 0].to(dtype).requires_grad_() for t in self._tensors())
        s = q @ k.T * q.shape[1] ** -0.5
        if self.sort.causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu_(1), -math.inf)
        p = torch.softmax(s, -1)
        out = p @ v
        if self.sort.kernel == "forward":
            with torch.no_grad():
                entropy = -(p * p.clamp_min(torch.finfo(dtype).tiny).log()).sum(-1)
                return {"out": out.detach(), "lse": s.logsumexp(-1), "entropy": entropy}
        if self.sort.kernel in ("keys", "queries"):
            given = torch.autograd.grad(out, (q, k, v), self.pull[0, 0].to(dtype))
            return dict(zip("qkv", given, strict=True))
        if self.sort.kernel == "received":
            return {"received": p.detach().sum(0)}
        cells = min(CELLS, len(q))
        grid = p.detach().unflatten(1, (cells, -1)).unflatten(0, (cells, -1))
        return {"map": grid.sum((1, 3))}

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs.q, self.inputs.k, self.inputs.v


def errors(answers: Answers, truth: Answers) -> dict[str, float]:
    return {name: float((answers[name].double() - truth[name]).norm()) for name in truth}


def why_wrong(got: Answers, truth: Answers, plain: dict[str, float]) -> str:
    """What differs from float64 by more than plain arithmetic in the inputs' precision errs;
    nothing if the answers are right. The same law as in tests/parity/agreement.py."""
    for name, whole in got.items():
        if not bool(whole.isfinite().all()):
            return f"{name} has NaN or infinity"
    found = errors({name: t[0, 0] for name, t in got.items()}, truth)
    for name, error in found.items():
        rounding = torch.finfo(got[name].dtype).eps * float(truth[name].norm())
        if error > 4 * plain[name] + rounding:
            return f"{name} errs by {error:.3g}, plain arithmetic by {plain[name]:.3g}"
    return ""


def tried(setup: Setup, sort: Sort, n: int) -> Iterator[tuple[Any, str, float]]:
    """Each setting with why it fails, if it does, and milliseconds, if it does not."""
    trial = Trial.make(setup, sort, n)
    run_with = trial.runner()
    truth = trial.formula(torch.float64)
    plain = errors(trial.formula(trial.inputs.q.dtype), truth)
    for how in grid(sort, trial.inputs):
        run = run_with(how)
        try:
            problem = why_wrong(run(), truth, plain)
        # Too much shared memory, or a compiler that gives up: a setting that this card lacks.
        except Exception as error:
            yield how, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}", math.inf
            continue
        yield how, problem, math.inf if problem else setup.medians({"": run})[""]


def compile_class(text: str) -> None:
    """Compile every n-th setting of a sort of calls: text is sort@i/n."""
    name, share = text.split("@")
    first, n = map(int, share.split("/"))
    sort, setup = Sort.parse(name), Setup()
    trial = Trial.make(setup, sort, LENGTHS[0])
    run_with = trial.runner()
    for how in grid(sort, trial.inputs)[first::n]:
        # Whatever fails here fails again, and is told, when it is measured.
        try:
            run_with(how)()
        except Exception as error:
            print(how, error)


def tune(kernels: str, processes: int, setup: Setup | None = None) -> None:
    """Try settings for every sort of calls and print the best."""
    wanted = sorts(kernels)
    if setup is None:
        setup = Setup()
        shares = max(1, processes // len(wanted))
        ahead = [f"{sort}@{i}/{shares}" for sort in wanted for i in range(shares)]
        run_all([Command("warm", [*THIS, "--warm", f"tune:{text}"]) for text in ahead], processes)
    for sort in wanted:
        for n in LENGTHS:
            results = list(tried(setup, sort, n))
            for how, problem, _ in results:
                if problem:
                    print(f"  {sort} {n}: {how}: {problem}")
            (_, _, now), *_ = results
            best, _, fastest = min(results, key=lambda result: result[2])
            rate = sort.work(n) / fastest / 1e9
            print(f"{sort} {n}: {best}")
            print(f"    {fastest:.3f} ms, {rate:.0f} TFLOP/s, {now / fastest:.2f}× the one in use")
            for how, _, took in sorted(results, key=lambda result: result[2])[1:3]:
                print(f"    then {took:.3f} ms: {how}")
            sys.stdout.flush()
