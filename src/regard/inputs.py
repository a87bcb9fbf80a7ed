"""The inputs of one attention call, checked once and for all.

Legend, here and everywhere: B batch, H query heads, G key heads, Q queries, K keys, D key width,
E value width. Query heads H are read as G groups of R = H / G.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.arguments import described, flag, is_number, refuse_dropout
from regard.biases.bias import Bias
from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.masks.convert import is_causal_bias
from regard.scores.comparison import Comparison
from regard.scores.dot import scaled_dot
from regard.scores.score import Score
from regard.transforms import may_learn
from regard.values import Axes, Pick, Shape

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionInputs:
    """Everything a backend needs: tensors with four axes, and bound masks and biases."""

    q: Float[Tensor, "b h q d"]
    k: Float[Tensor, "b g k d"]
    v: Float[Tensor, "b g k e"]
    comparison: Comparison
    mask: Mask | None = None
    bias: Bias | None = None
    softcap: float | None = None
    sink: Float[Tensor, "h"] | None = None
    dropout: float = 0.0
    seed: Int[Tensor, ""] | None = None
    rank: int = 4
    lead: tuple[int, ...] = ()
    """The axes that were folded into B, where there were several: inputs [*lead, H, N, D]."""

    @property
    def shape(self) -> Shape:
        B, H, Q, _ = self.q.shape
        return Shape(B, H, Q, self.k.shape[2])

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return max(self.q.shape[1] // max(self.k.shape[1], 1), 1)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Scores are computed in float32, or in float64 when the inputs are."""
        return _compute_dtype(self.q)

    @cached_property
    def largest_sum(self) -> float:
        """A bound on what is added up for a logit, and so on how far rounding can move it. Vectors
        that are not finite do not count. Waits for the device, once."""
        return self.comparison.largest_sum(self.q.detach(), self.k.detach())

    @property
    def needs_grad(self) -> bool:
        return may_learn(self.tensors())

    def tensors(self) -> list[Tensor]:
        """Every tensor inside."""
        return [self.q, self.k, self.v, *self._others()]

    @cached_property
    def others(self) -> tuple[Tensor, ...]:
        """Every tensor inside but q, k and v. Found once: calls of one kind have the same."""
        return tuple(self._others())

    def _others(self) -> list[Tensor]:
        found = [] if self.sink is None else [self.sink]
        for value in (self.comparison, self.mask, self.bias):
            found += [] if value is None else value.tensors()
        return found

    def with_qkv(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        """The same call of other queries, keys and values. (Fields at once: as a frozen dataclass
        sets them, one by one, they take longer than a tensor takes to be copied.)"""
        made = object.__new__(AttentionInputs)
        own = made.__dict__
        own.update(self.__dict__)
        own.pop("largest_sum", None)
        own["q"], own["k"], own["v"] = q, k, v
        return made

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> AttentionInputs:
        """The same call with every tensor changed, but for the seed."""
        return replace(
            self,
            q=change(self.q),
            k=change(self.k),
            v=change(self.v),
            comparison=self.comparison.map_tensors(change),
            mask=None if self.mask is None else self.mask.map_tensors(change),
            bias=None if self.bias is None else self.bias.map_tensors(change),
            sink=None if self.sink is None else change(self.sink),
        )

    def beside_tensors(self) -> tuple[Any, ...]:
        """All but q, k and v, in order: with others it makes a call of the same kind."""
        return (
            self.comparison, self.mask, self.bias, self.softcap, self.sink, self.dropout, self.seed,
            self.rank, self.lead,
        )  # fmt: skip

    def select(self, batch: Pick, heads: Pick, key_heads: Pick) -> AttentionInputs:
        """The part of the call that concerns some batch entries and heads."""
        return replace(
            self,
            q=self.q[batch][:, heads],
            k=self.k[batch][:, key_heads],
            v=self.v[batch][:, key_heads],
            comparison=self.comparison.select(heads),
            mask=None if self.mask is None else self.mask.select(batch, heads),
            bias=None if self.bias is None else self.bias.select(batch, heads),
            sink=None if self.sink is None else self.sink[heads],
        )

    def in_kind(self, answer: Tensor) -> Tensor:
        """An answer [B, H, ...] with the axes the caller's tensors had."""
        if self.rank > 4:
            return answer.reshape(*self.lead, *answer.shape[1:])
        if self.rank == 4:
            return answer
        return answer[:, 0] if self.rank == 3 else answer[0, 0]


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None,
    score: Score | None,
    bias: Bias | None,
    softcap: float | None,
    sink: Tensor | None,
    scale: float | None,
    dropout: float,
    training: bool,
) -> AttentionInputs:
    """Check a call, and bring it into the one form that backends take."""
    axes = _check_tensors(q, k, v)
    if not torch.compiler.is_compiling():
        q, k, v = in_memory(q), in_memory(k), in_memory(v)
    q, k, v = _autocast(q, k, v)
    _check_dtypes(q, k, v)
    check_kinds(mask, score, bias)
    _check_devices(q.device, score, bias, sink)
    if not (bias is None and sink is None) and not torch.compiler.is_compiling():
        sink = None if sink is None else in_memory(sink)
        bias = bias if bias is None or not _elsewhere(bias) else bias.map_tensors(in_memory)
    if axes.rank != 4:
        q, k, v = (_with_four_axes(t, axes) for t in (q, k, v))
        mask = None if mask is None else mask.on(axes)
        bias = None if bias is None else bias.on(axes)
    _check_shapes(q, k, v)
    if softcap is not None and not (is_number(softcap) and 0 < softcap < math.inf):
        raise RegardError(
            "softcap bounds the logits", got=described(softcap), accepted="a number above 0"
        )
    refuse_dropout(dropout)
    q, k, comparison = (score or scaled_dot()).prepare(q, k, scale)
    shape = Shape(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    _check_sink(sink, shape)
    # Without data there is still a mask to count; its tensors stay where they are.
    device = mask.device if mask is not None and q.device.type == "meta" else q.device
    drops = dropout if flag("training", training) else 0.0
    return AttentionInputs(
        q,
        k,
        v,
        comparison,
        None if mask is None else mask.bind(shape, device),
        None if bias is None else bias.bind(shape, q.device).computed_in(_compute_dtype(q)),
        softcap,
        sink,
        drops,
        drawn_seed() if drops else None,
        axes.rank,
        axes.lead if axes.rank > 4 else (),
    )


def drawn_seed() -> Int[Tensor, ""]:
    """Decides which weights dropout drops in a call."""
    return torch.randint(2**31, ())


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def in_memory(t: Tensor) -> Tensor:
    """A tensor whose numbers are those in its memory: a negative view has them with the other sign,
    and zeros of autograd's have no memory. Kernels that are given addresses do not know."""
    return t.clone() if t._is_zerotensor() else t.resolve_neg()


def _elsewhere(value: Bias) -> bool:
    """Whether numbers of a value are not those in memory."""
    return any(t.is_neg() or t._is_zerotensor() for t in value.tensors())


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, what PyTorch's own attention does: cast to the lower precision."""
    kind = q.device.type
    known = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    if not known or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    tensors = (q, k, v)
    if any(t.dtype == torch.float64 or not t.is_floating_point() for t in tensors):
        return q, k, v
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> Axes:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise RegardError(
                f"{name} must be a tensor", got=type(tensor).__name__, accepted="torch.Tensor"
            )
    if not (q.ndim == k.ndim == v.ndim) or q.ndim < 2:
        raise RegardError(
            "q, k and v need the same axes",
            got=_shapes(q, k, v),
            accepted="[B, H, N, D], or with more axes before H; or [B, N, D] or [N, D] for one "
            "head",
        )
    if not (q.device == k.device == v.device):
        raise RegardError(
            "q, k and v live on different devices",
            got=f"q {q.device}, k {k.device}, v {v.device}",
            accepted="one device",
        )
    if q.ndim > 4 and not (q.shape[:-3] == k.shape[:-3] == v.shape[:-3]):
        raise _different_batches(q, k, v)
    return Axes(tuple(q.shape[:-3]), True) if q.ndim > 3 else Axes(tuple(q.shape[:-2]), False)


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in DTYPES:
        raise RegardError(
            "q, k and v need one floating-point type",
            got=f"q {q.dtype}, k {k.dtype}, v {v.dtype}",
            accepted=", ".join(str(t).removeprefix("torch.") for t in DTYPES),
        )


def _check_devices(
    device: torch.device, score: Score | None, bias: Bias | None, sink: Tensor | None
) -> None:
    """Learned tensors must live with q. Masks are moved; moving these would hide a copy a call."""
    if score is None and bias is None and sink is None:
        return
    if sink is not None and not isinstance(sink, Tensor):
        raise RegardError(
            "sink= must be a tensor",
            got=type(sink).__name__,
            accepted="a tensor with one logit per head",
        )
    learned = {
        "sink": [] if sink is None else [sink],
        "score": [] if score is None else score.tensors(),
        "bias": [] if bias is None else bias.tensors(),
    }
    for name, tensors in learned.items():
        for tensor in tensors:
            if tensor.device != device:
                raise RegardError(
                    f"{name}= lives on another device",
                    got=f"{tensor.device}, while q is on {device}",
                    do=f"move it first: {name}.to({str(device)!r})",
                )


def check_kinds(mask: object, score: object, bias: object) -> None:
    """Whether masks, scores and biases are such."""
    if isinstance(mask, Tensor):
        raise RegardError(
            "a bare mask tensor does not say what True means",
            got=f"{mask.dtype} {list(mask.shape)}",
            accepted="a mask from regard.masks",
            do="masks.from_sdpa(t)"
            if is_causal_bias(mask)
            else "masks.keep(t) if True is attended to, masks.ignore(t) if True is masked, "
            "biases.dense(t) for numbers to add",
        )
    for name, value, kind in (("mask", mask, Mask), ("score", score, Score), ("bias", bias, Bias)):
        if value is not None and not isinstance(value, kind):
            module = {"mask": "masks", "score": "scores", "bias": "biases"}[name]
            raise RegardError(
                f"{name}= takes a value from regard.{module}",
                got=type(value).__name__,
                do=f"make one with regard.{module}, for example "
                + {"mask": "causal()", "score": "cosine(0.1)", "bias": "dense(tensor)"}[name],
            )


def _with_four_axes(t: Tensor, axes: Axes) -> Tensor:
    if axes.heads:
        return t.flatten(0, len(axes.lead) - 1)
    return t.unsqueeze(1) if axes.lead else t[None, None]


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    batch, heads, _, _ = q.shape
    key_batch, groups, keys, _ = k.shape
    value_batch, value_groups, values, _ = v.shape
    if not (batch == key_batch == value_batch):
        raise _different_batches(q, k, v)
    if groups != value_groups or keys != values:
        raise RegardError(
            "each key needs its value",
            got=_shapes(q, k, v),
            accepted="k and v with the same heads and length",
        )
    if heads and (not groups or heads % groups):
        raise RegardError(
            f"{heads} query heads cannot share {groups} key heads evenly",
            got=_shapes(q, k, v),
            accepted="a number of key heads that divides the number of query heads "
            "(fewer key heads is grouped-query attention; nothing is expanded)",
        )


def _different_batches(q: Tensor, k: Tensor, v: Tensor) -> RegardError:
    return RegardError(
        "q, k and v have different batch sizes", got=_shapes(q, k, v), accepted="one batch size"
    )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"


def _check_sink(sink: Tensor | None, shape: Shape) -> None:
    if sink is None:
        return
    if sink.ndim != 1 or sink.shape[0] != shape.H or not sink.is_floating_point():
        raise RegardError(
            "sink= is one logit per head that takes weight and gives nothing",
            got=f"{sink.dtype} {list(sink.shape)} for {shape.H} heads",
            accepted=f"a floating-point tensor [{shape.H}]",
        )
