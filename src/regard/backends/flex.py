"""PyTorch's FlexAttention: masks by tile, scores changed in the kernel, compiled on first use."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Repeated, Rows, SecondPass, Work, run_again
from regard.backends.poison import all_finite, finite, poison
from regard.biases.alibi import Alibi
from regard.biases.bias import LOWEST, Bias
from regard.biases.dense import Dense
from regard.biases.pairwise import BoundPairwise
from regard.biases.relative import Relative
from regard.cost.call_counts import visited_pairs
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.masks.tiles import FULL, PARTIAL, grid
from regard.scores.comparison import Dot
from regard.transforms import RECORDED, recorded, transformed

TILE = 128
VECTORS = torch.backends.cpu.get_cpu_capability()
"""The vector instructions that PyTorch uses on this CPU."""
Index = Tensor


class Flex:
    name = "flex"
    observes = False

    def refuses(self, inputs: AttentionInputs, *, statistics: bool) -> list[str]:
        x = inputs
        device = x.q.device.type
        reasons = []
        if statistics:
            reasons.append("it reports no entropy")
        if not isinstance(x.comparison, Dot):
            reasons.append("it compares by dot products only")
        if x.bias is not None and not isinstance(x.bias, (Alibi, Dense, Relative, BoundPairwise)):
            reasons.append("it has no score_mod for such a bias")
        if x.dropout:
            reasons.append("it has no dropout")
        if x.q.dtype == torch.float64:
            reasons.append("it has no float64 kernel")
        if transformed(x.tensors()):
            reasons.append("torch.func and forward mode do not see into what it compiles")
        if recorded():
            reasons.append(RECORDED)
        if 0 in (*x.shape, x.q.shape[-1], x.v.shape[-1]):
            reasons.append("it has no kernel for empty tensors")
        if device not in ("cpu", "cuda"):
            reasons.append(f"it is not known on {device}")
        if device == "cpu":
            if x.needs_grad:
                reasons.append("it has no backward pass on CPU")
            if x.sink is not None:
                reasons.append("it gives no log-sum-exp on CPU, which a sink needs")
            if x.v.shape[-1] != x.q.shape[-1]:
                reasons.append("its CPU kernel wants values as wide as keys")
            if VECTORS not in ("AVX2", "AVX512"):
                reasons.append("its CPU kernel is made of AVX2 instructions, which this CPU lacks")
            if not any(map(shutil.which, ("g++", "clang++", "cl"))):
                reasons.append("it needs a C++ compiler on CPU")
        return reasons

    def reserved(self, inputs: AttentionInputs) -> str:
        # On CPU it compiles C++ for seconds and wins nothing over the others; on CUDA its kernels
        # with a bias can ask for more memory than a multiprocessor has.
        plain = inputs.q.device.type == "cuda" and inputs.bias is None
        return "" if plain else "on CPU or with a bias: it compiles for seconds"

    def attend(self, inputs: AttentionInputs) -> Float[Tensor, "b h q e"]:
        x = inputs
        if x.mask is None or torch.compiler.is_compiling() or all_finite(x.q, x.k, x.v):
            return _flex(x, x.q, x.k, x.v)
        return self._without_leaks(x)

    def observe(self, inputs: AttentionInputs) -> Rows:
        raise RegardError("flex reports no entropy", do="let regard.trace choose the backend")

    def repeated(self, inputs: AttentionInputs, *, statistics: bool) -> Repeated:
        return run_again(self, inputs, statistics=statistics)

    def questions(self) -> SecondPass:
        raise RegardError(f"{self.name} keeps no row statistics, so there is nothing to ask")

    def work(self, inputs: AttentionInputs, *, statistics: bool) -> Work:
        rows, keys = (-(-n // TILE) for n in inputs.shape[2:])
        lists = 0 if inputs.mask is None else 4 * 4 * inputs.mask.batch * inputs.mask.heads
        return Work(visited_pairs(inputs, TILE, TILE), lists * rows * keys)

    def _without_leaks(self, x: AttentionInputs) -> Tensor:
        """Finite stand-ins for what is not finite, then what rows really see of it.

        With all logits 0 every allowed key weighs the same, so a row's output is above 0 just
        where it sees a number above 0."""

        def seen(what: Tensor) -> Tensor:
            even = torch.zeros_like(x.q), torch.zeros_like(x.k)
            return _flex(x, *even, what.to(x.v.dtype), changed=False) > 0

        out = _flex(x, finite(x.q), finite(x.k), finite(x.v))
        broken = (~x.k.isfinite()).any(-1, keepdim=True).expand_as(x.v)
        query = ~x.q.isfinite().all(-1, keepdim=True) & seen(torch.ones_like(x.v))
        return out + poison(x.v, seen).masked_fill(seen(broken) | query, math.nan)


@cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention, compiled anew for each length: with symbolic lengths, masks and score_mods
    that hold numbers do not compile (torch 2.11 on CUDA, 2.13 on CPU). It must never silently fall
    back to its n×n form, as it would beyond the compiler's default limit of recompilations."""
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    limits = config.patch(recompile_limit=128, fail_on_recompile_limit_hit=True)
    return cast(Callable[..., Any], limits(compiled))


def _flex(
    x: AttentionInputs, q: Tensor, k: Tensor, v: Tensor, *, changed: bool = True
) -> Float[Tensor, "b h q e"]:
    # Imported late: it costs half of what importing torch does.
    from torch.nn.attention.flex_attention import flex_attention

    assert isinstance(x.comparison, Dot)
    run: Callable[..., Any] = flex_attention
    if not torch.compiler.is_compiling():
        run = _compiled()
    with_sink = x.sink is not None and changed
    answer = run(
        q,
        k,
        v,
        score_mod=score_mod(x) if changed else None,
        block_mask=block_mask(x),
        scale=x.comparison.scale,
        enable_gqa=x.group > 1,
        **({"return_lse": True} if with_sink else {}),
    )
    if not with_sink:
        return answer  # type: ignore[no-any-return]
    assert x.sink is not None
    out, lse = answer
    share = torch.sigmoid(lse - x.sink.to(lse.dtype)[:, None])
    return (out * share[..., None]).to(out.dtype)  # type: ignore[no-any-return]


def block_mask(x: AttentionInputs) -> Any:
    """The mask as FlexAttention wants it: lists of tiles to visit, and a rule for partial ones."""
    from torch.nn.attention.flex_attention import BlockMask

    mask = x.mask
    if mask is None:
        return None
    states = grid(mask, x.shape, TILE, TILE, x.q.device, exact=False)
    return BlockMask.from_kv_blocks(
        *_lists(states == PARTIAL),
        *_lists(states == FULL),
        BLOCK_SIZE=TILE,
        mask_mod=mask.allows,
        seq_lengths=(x.shape.Q, x.shape.K),
    )


def _lists(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of each row are wanted, and which, the wanted ones first."""
    order = wanted.int().argsort(dim=-1, descending=True, stable=True)
    return wanted.sum(-1, dtype=torch.int32), order.int()


def score_mod(x: AttentionInputs) -> Callable[..., Tensor] | None:
    """Soft-cap and bias, as a function of one logit and its place."""
    cap, bias = x.softcap, None if x.bias is None else _at(x.bias, x.compute_dtype)
    if cap is None and bias is None:
        return None

    def change(s: Tensor, b: Index, h: Index, q: Index, k: Index) -> Tensor:
        if cap is not None:
            s = cap * torch.tanh(s / cap)
        if bias is None:
            return s
        added = bias(b, h, q, k)
        # The kernel counts in units of log 2, in which the least numbers are minus infinity.
        return s + torch.where((added < LOWEST) & (added != -torch.inf), LOWEST, added)

    return change


def _at(bias: Bias, dtype: torch.dtype) -> Callable[[Index, Index, Index, Index], Tensor]:
    """A bias in at most the precision of the logits: on a CPU the kernel reads its memory as their
    type."""
    match bias:
        case Alibi(slopes, int(offset)):
            slopes = slopes.to(dtype)
            return lambda b, h, q, k: -slopes[h] * (k - q - offset).abs()
        case Relative(table, int(offset)):
            reach, shared = table.shape[1] // 2, table.shape[0] == 1
            table = table.to(dtype)
            return lambda b, h, q, k: table[
                torch.zeros_like(h) if shared else h, (k - q - offset).clamp(-reach, reach) + reach
            ]
        case Dense(tensor):
            sizes, tensor = tensor.shape, tensor.to(dtype)
            return lambda *place: tensor[
                tuple(
                    i if n > 1 else torch.zeros_like(i) for i, n in zip(place, sizes, strict=True)
                )
            ]
        case BoundPairwise():
            return lambda b, h, q, k: bias.of(b, h, q, k).to(dtype)
    raise NotImplementedError(f"no score_mod for {bias!r}")
