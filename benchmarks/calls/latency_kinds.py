"""Kinds of calls whose first one is waited for: what is asked, of regard and of FlexAttention, and
whether the answer is right."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from regard import masks

WINDOW, DOCUMENT = 1024, 1300
OURS, PEER = "regard", "FlexAttention"


@dataclass(frozen=True)
class Kind:
    """What is asked: `does` is attention, trace, received (of a trace that is there) or backward
    (of an output that is there)."""

    name: str
    does: str = "trace"
    mask: str = "causal"
    B: int = 1
    H: int = 16
    G: int = 16
    Q: int = 4096
    K: int = 4096
    D: int = 128

    def shorter(self) -> Kind:
        """The same kind in a size for a CPU."""
        return replace(
            self, H=self.H // 8, G=max(1, self.G // 8), Q=-(-self.Q // 32), K=-(-self.K // 32)
        )

    def tensors(self, device: str) -> list[Tensor]:
        """bfloat16 on a card; a CPU may have no instructions for it."""
        source = torch.Generator().manual_seed(0)
        shapes = [(self.B, self.H, self.Q), (self.B, self.G, self.K), (self.B, self.G, self.K)]
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        learned = self.does == "backward"
        return [
            torch.randn(*shape, self.D, generator=source).to(device, dtype).requires_grad_(learned)
            for shape in shapes
        ]

    def ids(self, device: str) -> Tensor:
        return (torch.arange(self.K, device=device) // DOCUMENT).expand(self.B, -1).contiguous()

    def ours(self, device: str) -> masks.Mask | None:
        match self.mask:
            case "none":
                return None
            case "window":
                return masks.causal() & masks.window(WINDOW)
            case "documents":
                return masks.causal() & masks.documents(self.ids(device))
        return masks.causal()

    def flex(self, device: str) -> Any:
        """The same mask in FlexAttention's words, made before the clock starts."""
        # The last query stands at the last key.
        ahead, ids = self.K - self.Q, self.ids(device)

        def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return k <= q + ahead

        def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q + ahead) & (q + ahead - k <= WINDOW)

        def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q + ahead) & (ids[b, q + ahead] == ids[b, k])

        # A lone last query sees everything.
        if self.mask == "none" or (self.mask == "causal" and self.Q == 1):
            return None
        rule = {"causal": causal, "window": window, "documents": documents}[self.mask]
        batches = self.B if self.mask == "documents" else None
        return create_block_mask(rule, batches, None, self.Q, self.K, device=device)


FIRST = (
    Kind("trace, causal"),
    Kind("trace, full", mask="none"),
    Kind("trace, window", mask="window"),
    Kind("trace, documents", mask="documents"),
    Kind("trace, one query", H=32, G=8, Q=1),
    Kind("trace, causal, grouped heads", H=32, G=8),
    Kind("received() of a trace", does="received"),
    Kind("backward, causal", does="backward"),
    Kind("backward, causal, grouped heads", does="backward", H=32, G=8),
    Kind("attention, causal", does="attention"),
)
AFTER = (
    Kind("the same again"),
    Kind("another length", Q=4100, K=4100),
    Kind("a short length", Q=1000, K=1000),
    Kind("another window", mask="window"),
    Kind("no mask", mask="none"),
    Kind("a batch", B=3),
    Kind("grouped heads", H=32, G=8),
    Kind("fewer queries than keys", Q=1024),
)
"""What comes after a causal trace of the same width and type, in the same process."""


@dataclass(frozen=True)
class Timed:
    """What somebody waited for a call, and for what had to be there before it."""

    seconds: float
    before: float


def timed(kind: Kind, who: str, device: str) -> Timed | None:
    """Seconds of one call, as whoever makes it waits for it; then whether it was right. None where
    a peer has no such question."""
    tensors = kind.tensors(device)
    if who == PEER:
        if kind.does == "received":
            return None
        mask, grouped = kind.flex(device), kind.G != kind.H
        # Past the limit it would run in its n×n form.
        torch._dynamo.config.recompile_limit = 64
        compiled = torch.compile(flex_attention)

        def run() -> Any:
            return compiled(*tensors, block_mask=mask, enable_gqa=grouped)
    else:
        given = kind.ours(device)

        def run() -> Any:
            if kind.does == "attention":
                return regard.attention(*tensors, mask=given)
            t = regard.trace(*tensors, mask=given)
            return t if kind.does == "received" else t.out

    _wait(device)
    start = time.perf_counter()
    answer = run()
    _wait(device)
    seconds, before = time.perf_counter() - start, 0.0
    if kind.does in ("received", "backward"):
        before, pull = seconds, _pull(kind, tensors[0])
        _wait(device)
        start = time.perf_counter()
        answer = (
            answer.received()
            if kind.does == "received"
            else torch.autograd.grad(answer, tensors, pull)
        )
        _wait(device)
        seconds = time.perf_counter() - start
    check(kind, tensors, answer)
    return Timed(seconds, before)


def check(kind: Kind, tensors: list[Tensor], answer: Any) -> None:
    """Hold the first key head's part of an answer to the formula in float64: it may err four times
    as much as the formula does in the tensors' own precision, and one rounding."""
    mask = kind.ours("cpu")
    allowed = None if mask is None else mask.dense(kind.Q, kind.K)[0, 0].to(tensors[0].device)
    heads = kind.H // kind.G
    mine = [tensors[0][:1, :heads], tensors[1][:1, :1], tensors[2][:1, :1]]
    pull = _pull(kind, tensors[0])[:1, :heads]
    truth = _formula(kind, [t.double() for t in mine], pull.double(), allowed)
    rough = _formula(kind, mine, pull, allowed)
    given = answer if isinstance(answer, tuple) else (answer,)
    for found, want, plain in zip(given, truth, rough, strict=True):
        part = found[:1, : want.shape[1]].double()
        rounding = torch.finfo(found.dtype).eps * float(want.abs().max()) * math.sqrt(want.numel())
        bound = 4 * float((plain.double() - want).norm()) + rounding
        error = float((part - want).norm())
        if not error <= bound:
            raise AssertionError(f"{kind}: error {error:.3g}, where {bound:.3g} is allowed")


def _formula(
    kind: Kind, tensors: list[Tensor], pull: Tensor, allowed: Tensor | None
) -> tuple[Tensor, ...]:
    q, k, v = (t.detach().requires_grad_() for t in tensors)
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -math.inf)
    weights = logits.softmax(-1)
    if kind.does == "received":
        return (weights.sum(-2).detach(),)
    out = weights @ v
    if kind.does == "backward":
        return torch.autograd.grad(out, (q, k, v), pull)
    return (out.detach(),)


def _pull(kind: Kind, like: Tensor) -> Tensor:
    source = torch.Generator().manual_seed(1)
    return torch.randn(kind.B, kind.H, kind.Q, kind.D, generator=source).to(like)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def warmed(device: str) -> None:
    """What any program has behind it before its first attention: a context and a kernel."""
    torch.ones(8, device=device).add_(1).sum().item()
    _wait(device)


Sequence = list[tuple[Kind, str]]
"""Calls that one process makes: what, and of whom."""
