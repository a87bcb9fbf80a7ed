"""Hiding pairs by an instruction that the compiler does not choose by itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from regard.backends.triton.pairs import INTERPRETED
from regard.backends.triton.rules import BAND, allowed, band_at

PTX = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)
"""Whether a card runs the kernels that understands this."""


def _below(other: str) -> str:
    """A number where one integer is below another, without a sign, else `other`. Left to itself
    the compiler compares ahead of the products, packs what it found into bits, and unpacks them."""
    return f"""{{
.reg .pred p;
setp.lt.u32 p, $2, $3;
selp.f32 $0, $1, {other}, p;
}}"""


LOGIT_BELOW, WEIGHT_BELOW = tl.constexpr(_below("0fFF800000")), tl.constexpr(_below("0f00000000"))
"""With minus infinity, and with 0, for pairs that are hidden."""


@triton.jit
def only_allowed(s, rule, q, k, limit, table, BM: tl.constexpr, BN: tl.constexpr):
    """Logits of a partial tile, minus infinity where a pair is hidden."""
    if PTX and rule.kind == BAND:
        first, many = band_at(rule, q, limit)
        return tl.inline_asm_elementwise(
            LOGIT_BELOW, "=f,f,r,r", [s, k - first, many], tl.float32, True, 1
        )
    else:
        return tl.where(allowed(rule, q, k, limit, table, BM, BN), s, float("-inf"))
