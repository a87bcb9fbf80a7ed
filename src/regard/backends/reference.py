"""The definition of right: attention as the formula says it, with the whole n×n matrix.

    s = compare(q, k),  soft-capped, + bias,  -inf where a pair is masked
    p = exp(s - lse),   lse = log Σ exp(s)     (a sink is one more term of that sum)
    out = p v

Made of differentiable operations only, so it can be differentiated any number of times.
"""

from __future__ import annotations

import itertools
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from regard.backends.contract import (
    LogitSpread,
    Pool,
    Repeated,
    Rows,
    SecondPass,
    Top,
    Work,
    run_again,
)
from regard.backends.dropout import kept
from regard.backends.exactness import as_found, widened
from regard.backends.poison import finite, poison
from regard.backends.precision import in_full_precision
from regard.inputs import AttentionInputs
from regard.masks.algebra import pairs
from regard.scores.comparison import (
    Comparison,
    Dot,
    DotInOrder,
    FeatureProduct,
    Nearness,
    TanhSum,
    logarithm,
)
from regard.transforms import recorded


class Reference:
    name = "reference"
    observes = True

    def refuses(self, inputs: AttentionInputs, *, statistics: bool) -> list[str]:
        return []

    def reserved(self, inputs: AttentionInputs) -> str:
        return "" if recorded() else "it builds the n×n matrix"

    def attend(self, inputs: AttentionInputs) -> Float[Tensor, "b h q e"]:
        return self.observe(inputs).out

    @in_full_precision
    def observe(self, inputs: AttentionInputs) -> Rows:
        s = logits(inputs)
        terms = s if inputs.sink is None else torch.cat([s, _sink_column(inputs, s)], -1)
        top = terms.detach().amax(-1, keepdim=True) if terms.shape[-1] else terms.sum(-1, True)
        shift = torch.where(top == -math.inf, 0.0, top)
        weight = torch.exp(terms - shift)
        total = weight.sum(-1, keepdim=True)
        empty = total == 0
        total = torch.where(empty, 1.0, total)
        p = weight / total
        lse = torch.where(empty, -math.inf, shift + torch.log(total))
        # A weight of 0 adds 0, however far below the others its logit is.
        surprise = torch.log(total) - torch.where(weight == 0, 0.0, terms - shift)
        entropy = torch.where(empty, 0.0, (p * surprise).sum(-1, keepdim=True))
        out = _mix(inputs, p[..., : s.shape[-1]])
        largest = s.detach().amax(-1) if s.shape[-1] else torch.full_like(lse[..., 0], -math.inf)
        return Rows(out.to(inputs.v.dtype), lse.squeeze(-1), largest, entropy.squeeze(-1))

    def repeated(self, inputs: AttentionInputs, *, statistics: bool) -> Repeated:
        return run_again(self, inputs, statistics=statistics)

    def questions(self) -> SecondPass:
        return ReferencePass()

    def work(self, inputs: AttentionInputs, *, statistics: bool) -> Work:
        B, H, Q, K = inputs.shape
        return Work(B * H * Q * K, 3 * B * H * Q * K * inputs.compute_dtype.itemsize)


def logits(x: AttentionInputs) -> Float[Tensor, "b h q k"]:
    """Every logit, minus infinity where a pair is masked."""
    dtype = x.compute_dtype
    q, k = x.q.to(dtype), x.k.to(dtype).repeat_interleave(x.group, dim=1)
    s, true = (_compare(x.comparison, finite(q), each) for each in (finite(k), k.detach()))
    if x.softcap is not None:
        s, true = (x.softcap * torch.tanh(each / x.softcap) for each in (s, true))
    # The logits of a key that is not finite are what arithmetic makes of it: minus infinity is not
    # looked at. Gradients are those of what is finite in it.
    s = s + torch.where(~k.isfinite().all(-1)[..., None, :], true - s, 0.0).detach()
    # A query that is not finite has no logits. Its products could all be -inf, and the row would
    # pass for one that sees nothing; its gradients are NaN like the output they are of, so that
    # whoever skips a step on NaN skips this one.
    broken = ~q.isfinite().all(-1)[..., :, None]
    s = s + torch.zeros_like(s).masked_fill(broken, math.nan)
    q_places, k_places = _places(x)
    if x.bias is not None:
        s = s + x.bias.at(q_places, k_places).to(dtype)
    if x.mask is not None:
        s = s.masked_fill(~pairs(x.mask, q_places, k_places), -math.inf)
    return s


def _compare(how: Comparison, q: Tensor, k: Tensor) -> Tensor:
    match how:
        case Dot(scale):
            return scale * torch.einsum("bhqd,bhkd->bhqk", q, k)
        case DotInOrder():
            return how.logits(q[:, :, None], k).squeeze(2)
        case FeatureProduct():
            return logarithm(torch.einsum("bhqd,bhkd->bhqk", q, k))
        case TanhSum(w):
            together = torch.tanh(q[:, :, :, None] + k[:, :, None])
            w = w.to(q.dtype)
            return (together * (w if w.ndim == 1 else w[:, None, None])).sum(-1)
        case Nearness(bandwidth, squared):
            apart = q[:, :, :, None] - k[:, :, None]
            if squared:
                return -apart.square().sum(-1) / (2 * bandwidth**2)
            length: Tensor = torch.linalg.vector_norm(apart, dim=-1)
            return -length / bandwidth
    raise NotImplementedError(f"no formula for {how!r}")


def _mix(x: AttentionInputs, p: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q e"]:
    """p v, in which a masked value does not count even if it is NaN."""
    if x.dropout:
        assert x.seed is not None
        b, h, q, k = (torch.arange(n, device=p.device) for n in x.shape)
        p = p * kept(x.seed, x.dropout, b, h, q, k) / (1 - x.dropout)
    v = x.v.to(x.compute_dtype).repeat_interleave(x.group, dim=1)
    if x.mask is None:
        return p @ v
    allowed = pairs(x.mask, *_places(x)).to(v.dtype).expand(*v.shape[:2], -1, -1)
    return p @ finite(v) + poison(v, lambda what: allowed @ what > 0)


def _places(x: AttentionInputs) -> tuple[Tensor, Tensor]:
    return torch.arange(x.shape.Q, device=x.q.device), torch.arange(x.shape.K, device=x.q.device)


def _sink_column(x: AttentionInputs, s: Tensor) -> Tensor:
    assert x.sink is not None
    return x.sink.to(s.dtype).view(-1, 1, 1).expand(*s.shape[:3], 1)


class ReferencePass(SecondPass):
    """Questions about the weights, answered from the whole matrix."""

    @torch.no_grad()
    @in_full_precision
    def received(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"]
    ) -> Float[Tensor, "b h k"]:
        return _weights(inputs, lse).sum(-2)

    @in_full_precision
    def mass(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], keys: Int[Tensor, "k"]
    ) -> Float[Tensor, "b h q"]:
        return _weights(inputs, lse)[..., keys].sum(-1)

    @torch.no_grad()
    @in_full_precision
    def first_logit(self, inputs: AttentionInputs) -> Float[Tensor, "b h q"]:
        return logits(inputs)[..., 0]

    @torch.no_grad()
    @in_full_precision
    def top(self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], n: int) -> Top:
        p = _weights(inputs, lse).masked_fill(logits(inputs) == -math.inf, -1.0)
        values, indices = p.topk(min(n, p.shape[-1]), dim=-1)
        return Top(values.clamp_min(0), indices.masked_fill(values < 0, -1))

    @torch.no_grad()
    @in_full_precision
    def pooled(
        self,
        inputs: AttentionInputs,
        lse: Float[Tensor, "b h q"],
        cells: tuple[int, int],
        queries: tuple[int, int],
        keys: tuple[int, int],
        pool: Pool,
    ) -> Float[Tensor, "b h rows columns"]:
        p = _weights(inputs, lse)[..., slice(*queries), slice(*keys)]
        rows = [list(part) for part in _parts(p.shape[-2], cells[0])]
        columns = [list(part) for part in _parts(p.shape[-1], cells[1])]
        grid = [[_pool(p[..., r, :][..., c], pool) for c in columns] for r in rows]
        return torch.stack([torch.stack(row, -1) for row in grid], -2)

    @torch.no_grad()
    @in_full_precision
    def mean_logit(self, inputs: AttentionInputs) -> Float[Tensor, "b h q"]:
        s = logits(inputs)
        seen = s != -math.inf
        count = seen.sum(-1)
        mean = torch.where(seen, s, 0.0).sum(-1) / count.clamp_min(1)
        return torch.where(count > 0, mean, -math.inf)

    @torch.no_grad()
    @in_full_precision
    def logit_spread(self, inputs: AttentionInputs) -> LogitSpread:
        s = logits(inputs)
        seen = s != -math.inf
        count = seen.sum(-1).clamp_min(1)
        mean = torch.where(seen, s, 0.0).sum(-1) / count
        away = torch.where(seen, s - mean[..., None], 0.0)
        # One more place, so that there is one where there are no keys.
        lowest = F.pad(torch.where(seen, s, math.inf), (0, 1), value=math.inf).amin(-1)
        return LogitSpread(away.square().sum(-1) / count, lowest)

    @in_full_precision
    def logits(
        self,
        inputs: AttentionInputs,
        queries: Int[Tensor, "some_q"],
        keys: Int[Tensor, "some_k"],
    ) -> Float[Tensor, "b h some_q some_k"]:
        return logits(inputs)[..., queries, :][..., keys]

    @in_full_precision
    def weights(
        self,
        inputs: AttentionInputs,
        lse: Float[Tensor, "b h q"],
        queries: Int[Tensor, "some_q"],
        keys: Int[Tensor, "some_k"],
    ) -> Float[Tensor, "b h some_q some_k"]:
        return _weights(inputs, lse)[..., queries, :][..., keys]


def _weights(x: AttentionInputs, lse: Tensor) -> Float[Tensor, "b h q k"]:
    wide = widened(x, lse)
    s = logits(x if wide is None else wide)
    hidden = s == -math.inf
    if wide is None:
        return torch.where(hidden, 0.0, torch.exp(torch.where(hidden, 0.0, s - lse[..., None])))
    terms = s if x.sink is None else torch.cat([s, _sink_column(x, s)], -1)
    top = terms.detach().amax(-1, keepdim=True)
    unseen = (terms == -math.inf) | (lse[..., None] == -math.inf)
    away = torch.where(unseen, 0.0, terms - as_found(top, lse[..., None]))
    weight = torch.where(unseen, 0.0, torch.exp(away))
    total = weight.sum(-1, keepdim=True)
    p = (weight / torch.where(total == 0, 1.0, total))[..., : s.shape[-1]]
    return torch.where(hidden, 0.0, p).to(lse.dtype)


def _parts(n: int, cells: int) -> list[range]:
    """n places in so many cells: place i is in cell ⌊i · cells / n⌋."""
    edges = [-(-i * n // cells) for i in range(cells + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def _pool(block: Tensor, pool: Pool) -> Tensor:
    if pool == "max":
        return block.amax((-1, -2))
    return block.sum((-1, -2)) if pool == "sum" else block.mean((-1, -2))
