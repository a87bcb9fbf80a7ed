"""PyTorch's own fused attention, where it means the same and stays fused."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.backends import cudnn_plans
from regard.backends.contract import Repeated, Rows, SecondPass, Work, run_again
from regard.backends.poison import all_finite, finite, poison
from regard.biases.dense import Dense
from regard.cost.call_counts import dense_pairs, visited_pairs
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.masks.algebra import pairs
from regard.masks.keep import Keep
from regard.scores.comparison import Dot
from regard.transforms import (
    exporting,
    may_carry_tangents,
    may_learn,
    recorded,
    under_torch_func,
)

SMALL = 1 << 18
"""Pairs up to which a mask may be written out: the size of one tile, not a matter of n."""


class Sdpa:
    name = "sdpa"
    observes = False

    def refuses(self, inputs: AttentionInputs, *, statistics: bool) -> list[str]:
        x = inputs
        reasons = []
        if statistics:
            reasons.append("it keeps no row statistics")
        if not isinstance(x.comparison, Dot):
            reasons.append("it compares by dot products only")
        elif x.mask is not None and not x.comparison.scale > 0:
            # Minus infinity times 0 is no number, and times a negative one it is the largest.
            reasons.append("it hides pairs before it multiplies by the scale")
        if x.softcap is not None:
            reasons.append("it has no soft-cap")
        if x.sink is not None:
            reasons.append("it has no sink")
        if x.bias is not None and not isinstance(x.bias, Dense):
            reasons.append("it would write the bias out as an n×n tensor")
        if x.bias is not None and x.mask is not None:
            reasons.append("it takes a bias or a mask, not both")
        if x.bias is not None and may_learn(x.bias.tensors()):
            reasons.append("its fused kernels give a bias no gradient")
        if may_carry_tangents(x.tensors()):
            reasons.append("its fused kernels have no forward mode")
        if not self._mask_fits(x):
            reasons.append("it would write the mask out as an n×n tensor")
        if 0 in (*x.shape, x.q.shape[-1], x.v.shape[-1]):
            reasons.append("it has no fused kernel for empty tensors")
        return reasons or self._unfused(x)

    def reserved(self, inputs: AttentionInputs) -> str:
        return "under torch.func: PyTorch would map it in a loop" if under_torch_func() else ""

    def attend(self, inputs: AttentionInputs) -> Float[Tensor, "b h q e"]:
        x = inputs
        q, k, v = x.q, x.k, x.v
        if not (q.stride(-1) == k.stride(-1) == v.stride(-1) == 1):
            q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        causal = _causal(x)
        mask = None if causal else _written(x)
        if x.bias is not None or not (causal or mask is not None):
            return _sdpa(x, q, k, v, causal, mask)
        if _may_ask(x):
            # A value that leaked shows in the output, a key perhaps only in gradients. The CPU
            # kernel's rows come in blocks of 32 or more, and a masked value spoils a causal block
            # as a whole; on a GPU the last row, of which nothing is masked, tells.
            out = _sdpa(x, q, k, v, causal, mask)
            rows = slice(None, None, 32) if x.q.device.type == "cpu" else slice(-1, None)
            told = out[:, :, rows] if causal else out
            # The row of an infinite query may come out as one that sees nothing.
            if all_finite(q, told) and (not x.needs_grad or all_finite(k)):
                return _without_empty(x, out, mask)
        out = _sdpa(x, finite(q), finite(k), finite(v), causal, mask)
        return _without_empty(x, out, mask) + _spoiled(x, causal, mask)

    def observe(self, inputs: AttentionInputs) -> Rows:
        raise RegardError("sdpa keeps no row statistics", do="let regard.trace choose the backend")

    def repeated(self, inputs: AttentionInputs, *, statistics: bool) -> Repeated:
        plain = inputs.mask is None and not statistics
        if not plain or any(t.stride(-1) != 1 for t in (inputs.q, inputs.k, inputs.v)):
            return run_again(self, inputs, statistics=statistics)
        assert isinstance(inputs.comparison, Dot)
        scale, grouped = inputs.comparison.scale, _grouped(inputs)
        learned = inputs.needs_grad and inputs.q.is_cuda

        # No checks are left: a decoding step takes longer in Python than on a GPU.
        def again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if learned:
                out = cudnn_plans.attend_to_learn(q, k, v, None, 0.0, False, scale, grouped)
                if out is not None:
                    return out
            # Looked up at each call: other code may replace the function for a while.
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, scale=scale, enable_gqa=grouped
            )

        return again

    def questions(self) -> SecondPass:
        raise RegardError(f"{self.name} keeps no row statistics, so there is nothing to ask")

    def work(self, inputs: AttentionInputs, *, statistics: bool) -> Work:
        mask = None if _causal(inputs) else _written(inputs)
        scratch = 0 if mask is None else mask.numel() * inputs.q.element_size()
        if _causal(inputs):
            return Work(visited_pairs(inputs, 128, 512), scratch)
        return Work(dense_pairs(inputs), scratch)

    def _mask_fits(self, x: AttentionInputs) -> bool:
        if x.mask is None or _causal(x) or _sees_all(x):
            return True
        if isinstance(x.mask, Keep):
            return True
        if _has_any_length(x):
            return False
        return x.shape.Q * x.shape.K * x.mask.batch * x.mask.heads <= SMALL

    def _unfused(self, x: AttentionInputs) -> list[str]:
        """Where PyTorch would silently fall back to n×n."""
        if x.q.device.type == "cpu":
            reasons = []
            if x.dropout:
                reasons.append("its fused CPU kernel has no dropout")
            if x.v.shape[-1] != x.q.shape[-1]:
                reasons.append("its fused CPU kernel wants values as wide as keys")
            return reasons
        if x.q.device.type != "cuda":
            return [f"its fused kernels on {x.q.device.type} are not known here"]
        if not torch.compiler.is_compiling() and not all(map(_is_aligned, (x.q, x.k, x.v))):
            # They take such tensors and give numbers that are not the answer (torch 2.11).
            return ["its CUDA kernels read rows wrongly that do not start at multiples of 16 bytes"]
        if torch.compiler.is_compiling():
            # The compiler cannot trace the question (torch 2.9 to 2.13).
            return ["inside a compiled graph its CUDA kernels cannot be asked whether they take it"]
        if under_torch_func():
            return ["its CUDA kernels do not run under torch.func"]
        cuda = torch.backends.cuda
        params = cuda.SDPAParams(x.q, x.k, x.v, _written(x), x.dropout, _causal(x), _grouped(x))
        kernels = (
            cuda.can_use_flash_attention,
            cuda.can_use_efficient_attention,
            cuda.can_use_cudnn_attention,
        )
        fused = any(can(params) for can in kernels)
        return [] if fused else ["none of its fused CUDA kernels takes this call"]


def _sdpa(
    x: AttentionInputs, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
) -> Tensor:
    assert isinstance(x.comparison, Dot)
    scale, grouped = x.comparison.scale, _grouped(x)
    if q.is_cuda and x.needs_grad and (mask is None or mask.dtype == q.dtype):
        out = cudnn_plans.attend_to_learn(q, k, v, mask, x.dropout, causal, scale, grouped)
        if out is not None:
            return out
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, x.dropout, causal, scale=scale, enable_gqa=grouped
    )


def _is_aligned(t: Tensor) -> bool:
    """Whether all rows of a tensor start at multiples of 16 bytes."""
    if type(t) not in (Tensor, torch.nn.Parameter) or under_torch_func():
        return True
    step = 16 // t.element_size()
    return t.data_ptr() % 16 == 0 and not any(stride % step for stride in t.stride()[:-1])


def _may_ask(x: AttentionInputs) -> bool:
    """Whether values may be read: that would break a compiled graph or one that is being captured,
    and under `torch.func` a tensor may stand for many. There the careful path is taken always."""
    if torch.compiler.is_compiling() or under_torch_func() or recorded():
        return False
    return x.q.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _without_empty(x: AttentionInputs, out: Tensor, mask: Tensor | None) -> Tensor:
    """0 for rows that see nothing, for which CUDA's kernels give anything."""
    if mask is None or x.q.device.type == "cpu":
        return out
    return out.masked_fill(~mask.any(-1, keepdim=True), 0.0)


# Under the compiler a comparison of lengths is symbolic, and PyTorch's function wants a plain
# boolean: branching settles it.


def _grouped(x: AttentionInputs) -> bool:
    if x.group > 1:
        return True
    return False


def _causal(x: AttentionInputs) -> bool:
    """Whether the mask is the one PyTorch calls causal: k <= q, aligned to the start."""
    band = None if x.mask is None else x.mask.band()
    if band is None or band[1] != 0 or (math.isfinite(band[0]) and _has_any_length(x)):
        return False
    # A single key at distance 0 is all there is to see.
    if band[0] <= 1 - x.q.shape[2] and x.k.shape[2] > 1:
        return True
    return False


def _has_any_length(x: AttentionInputs) -> bool:
    """Whether a program is exported for calls of any length: what holds for some is not asked."""
    return exporting() and any(isinstance(n, torch.SymInt) for n in x.shape)


def hides(x: AttentionInputs) -> bool:
    """Whether the mask may hide a pair."""
    return x.mask is not None and not _sees_all(x)


def _sees_all(x: AttentionInputs) -> bool:
    """Whether the mask hides nothing, as causal does for the one query of a decoding step."""
    band = None if x.mask is None or _has_any_length(x) else x.mask.band()
    if band is not None and band[0] <= 1 - x.shape.Q and band[1] >= x.shape.K - 1:
        return True
    return False


def _written(x: AttentionInputs) -> Tensor | None:
    """The mask or bias as the tensor PyTorch wants, or None."""
    if isinstance(x.bias, Dense):
        return _narrowed(x.bias.tensor, x.q.dtype)
    if x.mask is None or _causal(x) or _sees_all(x):
        return None
    if isinstance(x.mask, Keep):
        return x.mask.table
    device = x.q.device
    return pairs(
        x.mask, torch.arange(x.shape.Q, device=device), torch.arange(x.shape.K, device=device)
    )


def _narrowed(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias in another type, in which the least numbers would be minus infinity."""
    least = torch.finfo(dtype).min
    if torch.finfo(bias.dtype).min >= least:
        return bias.to(dtype)
    return bias.clamp_min(least).masked_fill(bias == -math.inf, -math.inf).to(dtype)


def _spoiled(x: AttentionInputs, causal: bool, mask: Tensor | None) -> Float[Tensor, "b h q e"]:
    """NaN or infinity where a row really sees one."""
    dtype = x.compute_dtype
    k, v = (t.detach().to(dtype).repeat_interleave(x.group, dim=1) for t in (x.k, x.v))

    def seen(what: Tensor) -> Bool[Tensor, "b h q e"]:
        if causal:
            last = torch.arange(x.shape.Q, device=what.device).clamp_max(x.shape.K - 1)
            return what.cumsum(-2)[..., last, :] > 0
        assert mask is not None
        table = mask.to(dtype).expand(*what.shape[:2], -1, x.shape.K)
        return (table @ what > 0).expand(-1, -1, x.shape.Q, -1)

    broken_key = seen((~k.isfinite()).any(-1, keepdim=True).to(dtype))
    broken_query = ~x.q.isfinite().all(-1, keepdim=True) & seen(torch.ones_like(k[..., :1]))
    return poison(v, seen).masked_fill(broken_key | broken_query, math.nan).to(x.v.dtype)
