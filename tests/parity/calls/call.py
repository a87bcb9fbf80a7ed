"""One call as a user makes it, its answer, and what the formula in float64 says to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import regard
from regard.backends.reference import Reference, ReferencePass, logits
from regard.inputs import check
from tests.parity import cases
from tests.parity.agreement import Named, assert_as_exact, errors
from tests.parity.cases import DEFAULTS, plain

KINDS = ("attention", "trace")
SEED = 11
"""What PyTorch's generator is set to before each call: dropout draws from it."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=source, dtype=torch.float32).to(cases.DEVICE, dtype)


@dataclass(frozen=True, eq=False)
class Answer:
    """What came out of a call, with autograd's graph: gradients are asked for later, when other
    calls have been made in between."""

    kind: str
    found: Named
    learned: list[Tensor]

    def values(self) -> Named:
        found = dict(self.found)
        differentiable = [t for name, t in found.items() if t.requires_grad]
        if differentiable and self.learned:
            pulls = [draw(*t.shape, seed=7, dtype=t.dtype) for t in differentiable]
            given = torch.autograd.grad(differentiable, self.learned, pulls, allow_unused=True)
            for i, (tensor, grad) in enumerate(zip(self.learned, given, strict=True)):
                found[f"gradient {i}"] = torch.zeros_like(tensor) if grad is None else grad
        return {name: value.detach().cpu() for name, value in found.items()}


@dataclass(frozen=True, eq=False)
class Call:
    """The tensors and options of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    _known: dict[str, tuple[Named, Named]] = field(default_factory=dict, init=False)

    def change(self, **new: Any) -> Call:
        """The same call but for some tensors or options."""
        tensors = {name: new.pop(name) for name in ("q", "k", "v") if name in new}
        return replace(self, **tensors, options=self.options | new)

    def map_qkv(self, change: Callable[[Tensor], Tensor]) -> Call:
        return self.change(q=change(self.q), k=change(self.k), v=change(self.v))

    def learned(self) -> list[Tensor]:
        """The tensors that want gradients."""
        own = [t for t in (self.q, self.k, self.v, self.options.get("sink")) if t is not None]
        bias = self.options.get("bias")
        own += [] if bias is None else bias.tensors()
        return [t for t in own if t.requires_grad]

    def ask(self, kind: str, backend: str | None = None) -> Answer:
        """The call itself, as anybody makes it."""
        torch.manual_seed(SEED)
        how = self.options | {"backend": backend}
        if kind == "attention":
            out = regard.attention(self.q, self.k, self.v, **how)
            return Answer(kind, {"out": out}, self.learned())
        t = regard.trace(self.q, self.k, self.v, **how)
        with torch.no_grad():
            received = t.received()
        rows = {"out": t.out, "lse": t.lse, "entropy": t.entropy}
        return Answer(kind, rows | {"max_logit": t.max_logit, "received": received}, self.learned())

    def assert_right(self, answer: Answer) -> None:
        """Hold an answer to the formula, by what plain arithmetic of its precision errs.

        A sum of few numbers can come out right by luck, so before a result is called wrong the
        plain errors of four more draws are taken into account."""
        got, (truth, first) = answer.values(), self._told(answer.kind)
        # A graph gives rows alone; everything else is always answered.
        assert truth.keys() - got.keys() <= {"received"}
        truth = {name: truth[name] for name in got}
        try:
            assert_as_exact(got, truth, [first])
        except AssertionError:
            more = [self._drawn_anew(i)._told(answer.kind)[1] for i in range(1, 5)]
            assert_as_exact(got, truth, [first, *more])

    def _told(self, kind: str) -> tuple[Named, Named]:
        """What is true, and how far plain arithmetic is from it. Worked out once."""
        if kind not in self._known:
            low = torch.float32 if self.q.dtype == torch.float64 else self.q.dtype
            truth = self._in(torch.float64)._formula(kind).values()
            rough = self._in(low)._formula(kind, plainly=True).values()
            self._known[kind] = truth, errors(rough, truth)
        return self._known[kind]

    def _formula(self, kind: str, *, plainly: bool = False) -> Answer:
        torch.manual_seed(SEED)
        inputs = check(self.q, self.k, self.v, **(DEFAULTS | self.options))
        inputs = plain(inputs) if plainly else inputs
        rows = Reference().observe(inputs)
        if kind == "attention":
            return Answer(kind, {"out": rows.out}, self.learned())
        received = ReferencePass().received(inputs, rows.lse).detach()
        largest = logits(inputs).amax(-1) if inputs.shape.K else rows.max_logit
        found = rows._asdict() | {"max_logit": largest, "received": received}
        order = ("out", "lse", "entropy", "max_logit", "received")
        return Answer(kind, {name: found[name] for name in order}, self.learned())

    def _in(self, dtype: torch.dtype) -> Call:
        """The same numbers in another precision, in tensors of their own."""

        def copy(t: Tensor) -> Tensor:
            return t.detach().to(dtype, copy=True).requires_grad_(t.requires_grad)

        new = dict(self.options)
        if new.get("sink") is not None:
            new["sink"] = copy(new["sink"])
        if new.get("bias") is not None:
            new["bias"] = new["bias"].map_tensors(copy)
        with torch.inference_mode(False):
            return Call(copy(self.q), copy(self.k), copy(self.v), new)

    def _drawn_anew(self, seed: int) -> Call:
        def other(t: Tensor) -> Tensor:
            new = draw(*t.shape, seed=1000 * seed, dtype=t.dtype)
            return new.requires_grad_(t.requires_grad)

        return self.map_qkv(other)


def odd() -> Call:
    """Lengths that are multiples of nothing, grouped heads, values of another width."""
    shapes = [(2, 4, 27, 8), (2, 2, 37, 8), (2, 2, 37, 6)]
    return Call(*(draw(*shape, seed=i) for i, shape in enumerate(shapes)))


def common() -> Call:
    """On a card, a size and a type for which it has kernels of their own; smaller on a CPU."""
    card = cases.DEVICE != "cpu"
    n, width, dtype = (160, 64, torch.bfloat16) if card else (48, 16, torch.float32)
    return Call(*(draw(2, 4, n, width, seed=i, dtype=dtype) for i in range(3)))


BASES: dict[str, Callable[[], Call]] = {"odd": odd, "common": common}


def assert_each_right(kind: str, calls: list[Call], backend: str | None = None) -> None:
    """Make calls one after the other, then look at all answers: what a later call does must not
    reach an earlier answer either."""
    answers = [(call, call.ask(kind, backend)) for call in calls]
    for call, answer in answers:
        call.assert_right(answer)
