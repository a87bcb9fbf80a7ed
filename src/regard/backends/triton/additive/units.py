"""Hidden units of pairs.

tanh x is 1 - 2r with r = 1 / (1 + exp 2x). Four units share one division: the sum of four fractions
is one fraction. Where all queries and keys are small, 1 - 2r would cancel; a polynomial does not.

Queries and keys come turned, [B, H, D, N], as float32 numbers times 2 log₂ e: exp 2x is 2 to their
sum. They are loaded as a column and a row that broadcast against each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

SPREAD = tl.constexpr(2.8853900817779268)
"""2 log₂ e."""
SMALL = tl.constexpr(0.3)
"""Where nothing is larger, the polynomial is exact for all sums of two."""
MOST = tl.constexpr(30.0)
"""2 to this is as good as infinity beside 1, and four such numbers multiply without overflow."""


class Units(NamedTuple):
    """Weights of the units, one vector or one for each head, and the largest query or key."""

    w: Any
    head: Any
    span: Any


@triton.jit
def place_of(turned, b, h, row):
    """Where unit 0 of some queries, or keys, lies."""
    return turned.ptr + b.to(tl.int64) * turned.batch + h.to(tl.int64) * turned.head + row


@triton.jit
def _raised(qs, ks, q_row, k_row, d, q_inside, k_inside):
    """1 + exp 2x of unit d. NaN stays NaN."""
    y = tl.load(qs + d * q_row, mask=q_inside, other=0.0)
    y = y + tl.load(ks + d * k_row, mask=k_inside, other=0.0)
    return 1.0 + tl.exp2(tl.where(y > MOST, MOST, y))


@triton.jit
def _near(qs, ks, q_row, k_row, d, q_inside, k_inside):
    """tanh of unit d, where queries and keys are small."""
    x = tl.load(qs + d * q_row, mask=q_inside, other=0.0)
    x = (x + tl.load(ks + d * k_row, mask=k_inside, other=0.0)) * (1.0 / SPREAD)
    y = x * x
    near = -5.70498872745e-3 * y + 2.06390887954e-2
    near = near * y - 5.37397155531e-2
    near = near * y + 1.33314422036e-1
    near = near * y - 3.33332819422e-1
    return near * y * x + x


@triton.jit
def logits_of_units(
    qs, ks, q_row, k_row, units, h, q_inside, k_inside, empty, small, D: tl.constexpr
):
    """Σ w tanh(q + k), of pairs whose queries and keys lie at qs and ks; `empty` is a tile of 0."""
    w = units.w + h * units.head
    s = empty
    if small:
        for d in range(D):
            s += tl.load(w + d) * _near(qs, ks, q_row, k_row, d, q_inside, k_inside)
    else:
        whole = 0.0
        for d in range(0, D // 4 * 4, 4):
            w0, w1, w2, w3 = (
                tl.load(w + d),
                tl.load(w + d + 1),
                tl.load(w + d + 2),
                tl.load(w + d + 3),
            )
            whole += w0 + w1 + w2 + w3
            a = _raised(qs, ks, q_row, k_row, d, q_inside, k_inside)
            b = _raised(qs, ks, q_row, k_row, d + 1, q_inside, k_inside)
            up, down = w0 * b + w1 * a, a * b
            a = _raised(qs, ks, q_row, k_row, d + 2, q_inside, k_inside)
            b = _raised(qs, ks, q_row, k_row, d + 3, q_inside, k_inside)
            left, right = w2 * b + w3 * a, a * b
            s += (up * right + left * down) / (down * right)
        for d in range(D // 4 * 4, D):
            own = tl.load(w + d)
            whole += own
            s += own / _raised(qs, ks, q_row, k_row, d, q_inside, k_inside)
        s = whole - 2.0 * s
    return s


@triton.jit
def unit_and_slope(qs, ks, q_row, k_row, d, q_inside, k_inside, small):
    """tanh(q + k) of unit d, and its derivative 1 - tanh²."""
    if small:
        t = _near(qs, ks, q_row, k_row, d, q_inside, k_inside)
        slope = 1.0 - t * t
    else:
        r = 1.0 / _raised(qs, ks, q_row, k_row, d, q_inside, k_inside)
        t = 1.0 - 2.0 * r
        slope = 4.0 * (r - r * r)
    return t, slope
