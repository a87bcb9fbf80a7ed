"""How one query is compared with one key, once both are prepared.

Whatever a score does to queries or keys alone is done beforehand, in O(n). What is left for the
pairs is a comparison, of which there are four. Each says its logits for a tile of pairs, the
gradients that a gradient of those logits gives back, and how the logits move as its inputs do.

Shapes: q [B, G, R, Q, D] (R query heads share each of G key heads), k [B, G, K, D].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.transforms import may_carry_tangents, may_learn, transformed, under_torch_func
from regard.values import Pick, Value, readable

FAST = {torch.float32: (40.0, 1.0), torch.float64: (340.0, 1.0)}
"""Between which sizes of the largest query and key units are compared by their exponentials."""


class Gradients(NamedTuple):
    """What a gradient of logits gives back to queries, keys and the comparison's own tensors."""

    q: Float[Tensor, "b g r q d"]
    k: Float[Tensor, "b g k d"]
    own: list[Tensor]


class Comparison(Value):
    """Logits of query-key pairs."""

    scratch: int = 1
    """Numbers held per pair while logits are computed."""

    def logits(
        self, q: Float[Tensor, "b g r q d"], k: Float[Tensor, "b g k d"]
    ) -> Float[Tensor, "b g r q k"]:
        raise NotImplementedError

    def pull_back(
        self,
        q: Float[Tensor, "b g r q d"],
        k: Float[Tensor, "b g k d"],
        d: Float[Tensor, "b g r q k"],
    ) -> Gradients:
        raise NotImplementedError

    def largest_sum(self, q: Float[Tensor, "b h q d"], k: Float[Tensor, "b g k d"]) -> float:
        """A bound on the numbers that are added up for any one logit."""
        raise NotImplementedError

    def push_forward(
        self,
        q: Float[Tensor, "b g r q d"],
        k: Float[Tensor, "b g k d"],
        dq: Float[Tensor, "b g r q d"],
        dk: Float[Tensor, "b g k d"],
        own: Comparison,
    ) -> Float[Tensor, "b g r q k"]:
        """Tangents of the logits; `own` is this comparison with tangents as its tensors."""
        raise NotImplementedError

    def select(self, heads: Pick) -> Comparison:
        return self


def longest(vectors: Float[Tensor, "... d"]) -> float:
    """The length of the longest vector, among those that are finite."""
    if not vectors.numel():
        return 0.0
    # In float64, in which the square of no float32 number overflows.
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)
    return float(lengths.nan_to_num_(0.0, 0.0, 0.0).amax())


def both_longest(q: Float[Tensor, "... d"], k: Float[Tensor, "... d"]) -> tuple[float, float]:
    """The lengths of the longest queries and keys. A device is waited for once, and float32 is
    enough where nothing overflows in it: some of the time of a first question to a trace."""
    if q.numel() and k.numel() and q.device == k.device:
        wide = torch.promote_types(q.dtype, torch.float32)
        lengths = (torch.linalg.vector_norm(t, dim=-1, dtype=wide).amax() for t in (q, k))
        of_queries, of_keys = torch.stack([*lengths]).tolist()
        if math.isfinite(of_queries) and math.isfinite(of_keys):
            return of_queries, of_keys
    return longest(q), longest(k)


@dataclass(frozen=True, eq=False, repr=False)
class Dot(Comparison):
    """scale · q·k"""

    scale: float

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return _products(q * self.scale, k)

    def pull_back(self, q: Tensor, k: Tensor, d: Tensor) -> Gradients:
        rows = d.flatten(2, 3)
        dq = torch.matmul(rows, k).mul_(self.scale).unflatten(2, q.shape[2:4])
        return Gradients(dq, torch.matmul(rows.mT, q.flatten(2, 3)).mul_(self.scale), [])

    def push_forward(self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, own: Comparison) -> Tensor:
        return self.logits(dq, k) + self.logits(q, dk)

    def largest_sum(self, q: Tensor, k: Tensor) -> float:
        of_queries, of_keys = both_longest(q, k)
        return abs(self.scale) * of_queries * of_keys


@dataclass(frozen=True, eq=False, repr=False)
class DotInOrder(Comparison):
    """scale · q·k, added up coordinate by coordinate.

    A pair then has the same logit to the last bit whatever other pairs are computed with it, which
    no product of matrices promises; and it is far slower. For questions about logits so large that
    float64 rounds them noticeably. It is never differentiated by hand."""

    scale: float
    scratch = 2

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = q * self.scale, k[:, :, None, None]
        total = q.new_zeros(*q.shape[:4], k.shape[-2])
        for d in range(q.shape[-1]):
            total = total + q[..., d, None] * k[..., d]
        return total


@dataclass(frozen=True, eq=False, repr=False)
class TanhSum(Comparison):
    """w·tanh(q + k), with one w for all heads [D] or one per head [H, D]

    tanh(q + k) is 1 - 2r with r = 1 / (1 + exp(2q) exp(2k)): exponentials of queries and keys
    alone, and one division for each pair and unit. Its error is a rounding of 1 where that of tanh
    is one of itself, which matters where all units are near 0; those, and numbers whose
    exponentials would overflow, are left to tanh."""

    w: Tensor

    @property
    def scratch(self) -> int:  # type: ignore[override]
        return 2 * self.w.shape[-1]

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        w = self.w.to(q.dtype)
        r = self._shares(q, k)
        if r is None:
            return self._mixed(self._tanh(q, k))
        whole = w.sum(-1)
        whole = whole if w.ndim == 1 else whole.view(*q.shape[1:3], 1, 1)
        return self._mixed(r).mul_(-2).add_(whole)

    def pull_back(self, q: Tensor, k: Tensor, d: Tensor) -> Gradients:
        # Sums over pairs as products with the gradients, in which nothing of their size is made.
        flat = d.flatten(-2)[..., None, :]
        weights = self._weights(q)
        units = self._shares(q, k)
        if units is None:
            units = self._tanh(q, k)
            dw = torch.matmul(flat, units.flatten(-3, -2))
            slope = units.square_().neg_().add_(1)
        else:
            # t = 1 - 2r, and 1 - t² = 4 (r - r²).
            dw = torch.matmul(flat, torch.rsub(units, 1, alpha=2).flatten(-3, -2))
            slope, weights = units.addcmul_(units, units, value=-1), 4 * weights
        dw = dw.sum((0, 3)).flatten(0, 1)
        own = dw if self.w.ndim == 2 else dw.sum(0)
        dq = torch.matmul(d[..., None, :], slope).mul_(weights).squeeze(-2)
        dk = slope.mul_(d[..., None]).sum(3)
        dk = dk.mul_(weights if self.w.ndim == 1 else weights.squeeze(3)).sum(2)
        return Gradients(dq, dk, [own])

    def push_forward(self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, own: Comparison) -> Tensor:
        t = self._tanh(q, k)
        slope = (1 - t * t) * self._weights(q)
        moved = (slope * (dq[..., None, :] + dk[:, :, None, None])).sum(-1)
        # The logits are linear in w.
        return moved + own.logits(q, k)

    def largest_sum(self, q: Tensor, k: Tensor) -> float:
        return float(self.w.detach().to(torch.float64).abs().sum(-1).amax()) if len(self.w) else 0.0

    def select(self, heads: Pick) -> Comparison:
        return self if self.w.ndim == 1 else TanhSum(self.w[heads])

    def _tanh(self, q: Tensor, k: Tensor) -> Tensor:
        together = q[..., None, :] + k[:, :, None, None]
        alone = not (together.requires_grad or transformed((q, k)))
        return together.tanh_() if alone else together.tanh()

    def _shares(self, q: Tensor, k: Tensor) -> Tensor | None:
        """r of every pair and unit; None where tanh itself is more accurate, or gradients are
        needed."""
        if not readable(q) or not readable(k) or torch.is_grad_enabled() or not q.numel():
            return None
        top, least = FAST[q.dtype]
        spans = [float(t.abs().amax()) if t.numel() else math.inf for t in (q, k)]
        if not (max(spans) <= top and max(spans) >= least):
            return None
        a, b = (2 * q).exp_(), (2 * k).exp_()
        return (a[..., None, :] * b[:, :, None, None]).add_(1).reciprocal_()

    def _mixed(self, t: Tensor) -> Tensor:
        """Σ over units, by their weights: one product."""
        w = self.w.to(t.dtype)
        if w.ndim == 1:
            return torch.matmul(t, w)
        return torch.matmul(t, w.view(1, *t.shape[1:3], 1, w.shape[-1], 1)).squeeze(-1)

    def _weights(self, q: Tensor) -> Tensor:
        w = self.w.to(q.dtype)
        return w if w.ndim == 1 else w.view(1, *q.shape[1:3], 1, 1, w.shape[-1])


@dataclass(frozen=True, eq=False, repr=False)
class FeatureProduct(Comparison):
    """log(q·k) of features of 0 or more: the weight of a pair is its product's share of the row.
    Features that do not meet have the logit -inf, as if the pair were masked."""

    scratch = 2

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return logarithm(_products(q, k))

    def pull_back(self, q: Tensor, k: Tensor, d: Tensor) -> Gradients:
        met = _products(q, k)
        rows = torch.where(met > 0, d / met, 0.0).flatten(2, 3)
        dq = torch.matmul(rows, k).unflatten(2, q.shape[2:4])
        return Gradients(dq, torch.matmul(rows.mT, q.flatten(2, 3)), [])

    def push_forward(self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, own: Comparison) -> Tensor:
        met = _products(q, k)
        return torch.where(met > 0, (_products(dq, k) + _products(q, dk)) / met, 0.0)

    def largest_sum(self, q: Tensor, k: Tensor) -> float:
        # Terms of one sign: a product is rounded as a share of itself, whatever its size, and its
        # logarithm by the like of a logit of this size.
        return 100.0


def logarithm(t: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """log(t), whose derivative is 0 where t is 0: what is hidden there gives no gradient, where
    0 · ∞ would give NaN."""
    nothing = t == 0
    return t.masked_fill(nothing, 1.0).log().masked_fill(nothing, -math.inf)


@dataclass(frozen=True, eq=False, repr=False)
class Nearness(Comparison):
    """-|q - k|² / 2b² (a Gaussian kernel once exponentiated), or -|q - k| / b"""

    bandwidth: float
    squared: bool

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        far = self._distance(q, k)
        return far.square() / (-2 * self.bandwidth**2) if self.squared else far / -self.bandwidth

    def pull_back(self, q: Tensor, k: Tensor, d: Tensor) -> Gradients:
        if self.squared:
            pull = d / self.bandwidth**2
        else:
            far = self._distance(q, k)
            pull = torch.where(far > 0, d / (far * self.bandwidth), 0.0)
        rows, columns = pull.flatten(2, 3), q.flatten(2, 3)
        dq = torch.matmul(rows, k).unflatten(2, q.shape[2:4]) - pull.sum(-1, keepdim=True) * q
        dk = torch.matmul(rows.mT, columns) - rows.sum(2)[..., None] * k
        return Gradients(dq, dk, [])

    def push_forward(self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, own: Comparison) -> Tensor:
        # (q - k)·(q̇ - k̇), multiplied out.
        moved = (q * dq).sum(-1, keepdim=True) + (k * dk).sum(-1)[:, :, None, None]
        moved = moved - _products(q, dk) - _products(dq, k)
        if self.squared:
            return moved / -(self.bandwidth**2)
        far = self._distance(q, k)
        return torch.where(far > 0, moved / (far * -self.bandwidth), 0.0)

    def largest_sum(self, q: Tensor, k: Tensor) -> float:
        far = sum(both_longest(q, k))
        return far * far / (2 * self.bandwidth**2) if self.squared else far / self.bandwidth

    @staticmethod
    def _distance(q: Tensor, k: Tensor) -> Tensor:
        if may_carry_tangents((q, k)) or (under_torch_func() and may_learn((q, k))):
            # PyTorch's own has no derivative in forward mode, and under torch.func that of one
            # gradient where many are asked for at once (torch 2.13).
            apart = q[..., None, :] - k[:, :, None, None]
            length: Tensor = torch.linalg.vector_norm(apart, dim=-1)
            return length
        # Without the matrix-product shortcut, which loses near neighbours to cancellation.
        mode = "donot_use_mm_for_euclid_dist"
        rows = torch.cdist(q.flatten(2, 3), k, compute_mode=mode)
        return rows.view(*q.shape[:4], k.shape[2])


def _products(q: Float[Tensor, "b g r q d"], k: Float[Tensor, "b g k d"]) -> Tensor:
    """Dot products of all pairs. Query heads of a group are stacked as rows, so that keys are never
    expanded."""
    return torch.matmul(q.flatten(2, 3), k.mT).view(*q.shape[:4], k.shape[2])
