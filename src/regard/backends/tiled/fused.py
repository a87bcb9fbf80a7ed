"""Plain calls, compiled as a whole, forward and backward.

What `forward` and `backward` do with products and loops for every cut, the C functions do within
one core: each thread takes a row tile of one head after the other, and its tile of logits never
leaves the core's cache. Under a band (causal, windows) or no mask they find the keys of a row tile
themselves; for other masks Python writes tables of them, some row tiles at a time.

Both passes cut a call into the same tiles, so that large logits round alike in both.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.tiled.laid_bias import LaidBias, can_be_laid
from regard.backends.tiled.loop import TYPES, Attend, Loop, Pull, loop_for
from regard.backends.tiled.pieces import Packed, Piece, in_rows, lots, pieces
from regard.backends.tiled.plan import Plan, Product, product_of
from regard.backends.tiled.tiles import takes_all
from regard.cancellation import step
from regard.inputs import AttentionInputs
from regard.masks.keep import Keep
from regard.scores.comparison import Dot
from regard.transforms import exporting

_flash_sdp = torch._C._get_flash_sdp_enabled
LONG = 1 << 25
"""Multiplications that take longer than to find out what each query sees."""


class Passed(NamedTuple):
    """What the forward pass leaves behind: rows, and what rounding took from lse."""

    rows: Rows
    lse_rest: Float[Tensor, "b h q"]


class Gradients(NamedTuple):
    """Gradients of q, k and v, in the precision that scores are computed in."""

    q: Float[Tensor, "b h q d"]
    k: Float[Tensor, "b g k d"]
    v: Float[Tensor, "b g k e"]


def fusing(x: AttentionInputs) -> Loop | None:
    """The compiled loop, if it can run this call as a whole."""
    if not _is_whole(x):
        return None
    loop = loop_for(x.q.device, x.compute_dtype)
    return loop if loop is not None and loop.multiply else None


def _is_whole(x: AttentionInputs) -> bool:
    """Whether a call is one that the compiled loop runs as a whole."""
    if not isinstance(x.comparison, Dot) or x.dropout or not can_be_laid(x):
        return False
    if not (x.q.numel() and x.k.numel() and x.v.numel()):
        return False
    # The weight of a single key is exactly 1, when looked into too: PyTorch makes such products by
    # other means, which round differently.
    return x.k.shape[2] != 1


def outruns_pytorch(x: AttentionInputs) -> bool:
    """Whether this is known to be quicker than PyTorch's own kernel. Not where a program is
    exported: the machine it runs on is not known."""
    if x.q.device.type != "cpu" or exporting() or not _is_whole(x):
        return False
    if x.bias is not None or x.softcap is not None:
        return False
    if x.needs_grad and not _flash_sdp():
        # What PyTorch has left can be differentiated twice.
        return False
    if _outruns_written_masks(x):
        return True
    if x.q.dtype in (torch.bfloat16, torch.float16):
        return _has_loop() and _outruns_in_half(x)
    return x.q.dtype == torch.float32 and _has_loop() and _outruns_under_a_band(x)


def _outruns_in_half(x: AttentionInputs) -> bool:
    """Always on a CPU that has no instructions for half precision (4 to 150 times as fast on a
    Neoverse-N1). On one that has, with gradients from 64 tokens on: 1.2 to 3.3 times as fast (a
    Xeon with AVX-512). Without, where the loop multiplies matrices as they are (AMX), from 64
    tokens on, without a mask or under a band: 0.9 to 2.1 times as fast; elsewhere under a band from
    512: 1 to 1.4."""
    if not _multiplies(x.q.dtype):
        return True
    # Asking for the length of a compiled call, one would compile it for such lengths alone.
    if torch.compiler.is_compiling():
        return False
    if x.needs_grad or ((x.mask is None or x.mask.band() is not None) and _multiplies_narrow(x)):
        return min(x.shape.Q * x.group, x.shape.K) >= 64
    return _masks_by_a_band(x) and min(x.shape.Q, x.shape.K) >= 512


def _outruns_written_masks(x: AttentionInputs) -> bool:
    """Under masks that PyTorch's kernel wants written out. To write one, and to keep hidden NaN
    out, takes longer than the rest where a call is so small that all pairs are computed; else it
    computes what is hidden, where two numbers tell what a query sees. Not if the mask is written
    already, nor where a function must be asked each time, nor with gradients if it holds tensors:
    each of its calls is looked at then."""
    mask = x.mask
    if mask is None or isinstance(mask, Keep) or mask.band() is not None or mask.is_local():
        return False
    if torch.compiler.is_compiling() or (x.needs_grad and mask.tensors()):
        return False
    loop = fusing(x)
    # Of a single row products are not products of matrices, and their threads not ours.
    if loop is None or x.shape.Q * x.group == 1:
        return False
    if takes_all(x, Plan.of(x, loop).rows):
        return True
    B, H, Q, K = x.shape
    long = B * H * Q * K * (x.q.shape[-1] + x.v.shape[-1]) >= LONG
    return long and not mask.tensors() and mask.spans(x.shape, x.q.device) is not None


def _outruns_under_a_band(x: AttentionInputs) -> bool:
    """Under causal masks and windows, of which PyTorch's kernel computes masked pairs too; where
    gradients are wanted, from 64 tokens on."""
    if not _masks_by_a_band(x):
        return False
    if not x.needs_grad:
        return True
    return not torch.compiler.is_compiling() and min(x.shape.Q, x.shape.K) >= 64


def _has_loop() -> bool:
    """Whether there is a compiled loop that multiplies."""
    loop = loop_for(torch.device("cpu"), torch.float32)
    return loop is not None and bool(loop.multiply)


def _masks_by_a_band(x: AttentionInputs) -> bool:
    """Whether a band masks some pairs, and nothing else does."""
    band = None if x.mask is None else x.mask.band()
    if band is None:
        return False
    low, high = band
    return low > 1 - x.shape.Q or high < x.shape.K - 1


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether PyTorch has quick products of such matrices on this CPU. It says so itself, but for
    float16 on ARM, where that speaks of other layers than attention."""
    if dtype == torch.float16:
        arm = platform.machine() == "aarch64"
        return not arm and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _multiplies_narrow(x: AttentionInputs) -> bool:
    """Whether the loop multiplies the matrices of a call as they are given."""
    loop = loop_for(torch.device("cpu"), torch.float32)
    return loop is not None and product_of(x, loop) is not Product.FLOATS


# To torch.compile these are constants: it cannot follow how they are found. (As
# torch.compiler.assume_constant_result says it, which imports the compiler.)
for _known in (_has_loop, _multiplies):
    vars(_known)["_dynamo_marked_constant"] = True


def attend(x: AttentionInputs, loop: Loop, *, statistics: bool) -> Passed | None:
    """The forward pass. None: a hidden value that is not finite may have done harm."""
    plan = Plan.of(x, loop)
    B, H, Q = plan[:3]
    scratch = x.v.new_empty(plan.scratch, dtype=torch.float32)
    out = x.v.new_empty(B, H, Q, plan.E, dtype=x.v.dtype if plan.narrow else torch.float32)
    lse, rest = scratch.new_empty(B, H, Q), scratch.new_empty(B, H, Q)
    many = (B, H, Q) if statistics else (0,)
    largest, entropy = scratch.new_empty(many), scratch.new_empty(many)
    sink = None if x.sink is None else x.sink.to(torch.float32).contiguous()
    bias = LaidBias.of(x)
    for piece in pieces(x, plan, wide=not plan.narrow):
        packed = Packed.of(piece, plan, backward=False)
        call = Attend(
            **{"out_halves" if plan.narrow else "out": piece.address(out)},
            whole_heads=plan.whole_heads(piece.heads_of_keys),
            lse=piece.address(lse),
            rest=piece.address(rest),
            largest=piece.address(largest) if statistics else None,
            entropy=piece.address(entropy) if statistics else None,
            sink=None if sink is None else sink[piece.heads].data_ptr(),
            **described(x, loop, piece, plan, scratch, packed, bias),
        )
        for lot in lots(piece, plan):
            step(lot.first, -(-Q // plan.rows))
            lot.put(call)
            if not loop.attend(call, plan.threads):
                return None
    return Passed(Rows(out.to(x.v.dtype), lse, largest, entropy), rest)


def pull(
    x: AttentionInputs,
    loop: Loop,
    passed: Passed,
    g_out: Float[Tensor, "b h q e"],
    shift: Float[Tensor, "b h q"],
    g_entropy: Float[Tensor, "b h q"] | None,
) -> Gradients:
    """The backward pass. `shift` is what every weight of a row is shifted by."""
    plan = Plan.of(x, loop)
    B, H, Q, K, G, D, E = plan[:7]
    hands = plan.hands
    dq = x.q.new_empty(B, H, Q, D, dtype=torch.float32)
    # Packed products add these up with keys for columns.
    turned, n = plan.narrow_backward, plan.runs
    dk = dq.new_zeros((hands, B, G, D, n) if turned else (hands, B, G, K, D))
    dv = dq.new_zeros((hands, B, G, E, n) if turned else (hands, B, G, K, E))
    # Hooks on saved tensors may give them back in another type.
    lse, heat = _numbers(passed.rows.lse), g_entropy
    expected = None
    if heat is not None:
        heat, expected = _numbers(heat), _numbers(lse - passed.rows.entropy)
    rest, shift = _numbers(passed.lse_rest), _numbers(shift)
    scratch, bias = dq.new_empty(plan.backward_scratch), LaidBias.of(x)
    for piece in pieces(x, plan, wide=not turned):
        packed = Packed.of(piece, plan, backward=True)
        g = in_rows(g_out[piece.batch, piece.heads])
        keys = (0, piece.batch, piece.key_heads)
        call = Pull(
            g=g.data_ptr(),
            g_steps=_steps(g),
            lse=piece.address(lse),
            rest=piece.address(rest),
            shift=piece.address(shift),
            heat=None if heat is None else piece.address(heat),
            expected=None if expected is None else piece.address(expected),
            dq=piece.address(dq),
            dk=dk[keys].data_ptr(),
            dv=dv[keys].data_ptr(),
            dk_step=dk.stride(0),
            dv_step=dv.stride(0),
            key_heads=G,
            hands=hands,
            **described(x, loop, piece, plan, scratch, packed, bias),
        )
        for lot in lots(piece, plan):
            step()
            lot.put(call)
            loop.pull(call, plan.threads)
    dk, dv = (t[0] if hands == 1 else t.sum(0) for t in (dk, dv))
    if turned:
        assert isinstance(x.comparison, Dot)
        factors = zip((dk, dv), (x.comparison.scale, 1.0), strict=True)
        dk, dv = ((t[..., :K].mT * factor).contiguous() for t, factor in factors)
    return Gradients(dq, dk, dv)


def described(
    x: AttentionInputs,
    loop: Loop,
    piece: Piece,
    plan: Plan,
    scratch: Tensor,
    packed: Packed | None,
    bias: LaidBias | None = None,
) -> dict[str, Any]:
    """The fields of a call that both passes share, but for its lot of row tiles."""
    assert isinstance(x.comparison, Dot)
    q, k, v = piece.q, piece.k, piece.v
    low, high = plan.band or (0, 0)
    group = plan.group
    fields: dict[str, Any] = {"multiply": loop.multiply}
    if packed is not None:
        fields |= {"multiply_packed": loop.multiply_packed[x.q.dtype], "release": loop.release}
        fields |= {name: t.data_ptr() for name, t in packed.memory.items()} | {"unpacked": True}
    elif piece.halves is not None:
        fields |= {"multiply_halves": loop.multiply_halves[x.q.dtype]}
    if piece.halves is not None:
        fields |= {"type": TYPES[x.q.dtype]}
        for name, t in zip("qkv", piece.halves, strict=True):
            fields |= {f"{name}_halves": t.data_ptr(), f"{name}_half_steps": _steps(t)}
    if q.dtype == torch.float32:
        for name, t in zip("qkv", (q, k, v), strict=True):
            fields |= {name: t.data_ptr(), f"{name}_steps": _steps(t)}
    if bias is not None:
        fields |= bias.fields(piece.batch.start or 0, piece.heads.start or 0)
    return fields | {
        "rows_step": plan.H * plan.Q,
        "B": k.shape[0],
        "G": k.shape[1],
        "R": group,
        "Q": plan.Q,
        "K": plan.K,
        "D": plan.D,
        "E": plan.E,
        # Few queries of heads that share keys make one product together.
        "stacked": group > 1 and group * plan.Q <= plan.rows,
        "low": low,
        "high": high,
        "rows": plan.rows,
        "keys": plan.keys,
        "scratch": scratch.data_ptr(),
        "scratch_step": len(scratch) // plan.threads,
        "scale": x.comparison.scale,
        "cap": x.softcap or 0.0,
    }


def _numbers(rows: Float[Tensor, "b h q"]) -> Float[Tensor, "b h q"]:
    """As C reads them."""
    return rows.to(torch.float32).contiguous()


def _steps(t: Float[Tensor, "b h n d"]) -> ctypes.Array[ctypes.c_long]:
    # The stride of an axis of length 1 can be anything.
    row = t.stride(2) if t.shape[2] > 1 else t.shape[3]
    return (ctypes.c_long * 3)(t.stride(0), t.stride(1), row)
