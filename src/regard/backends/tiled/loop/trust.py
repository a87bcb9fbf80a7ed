"""Whether the compiled functions give what the formulas of forward.py give.

Asked once, before they are used. In plain Python, because tensors may be fake or live on another
device by default.
"""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from regard.backends.tiled.loop.compiled import AGAIN, PULL_AGAIN, TYPES, Attend, Loop, Pull
from regard.backends.tiled.loop.trust_units import MODES, compares

LEAST = -(2 - 2**-23) * 2.0**127
"""The least float32: the maximum of rows that have seen nothing."""


def trusted(loop: Loop) -> bool:
    """Whether a compiled loop may be used."""
    if not _absorbs(loop) or (loop.multiply is not None and not _attends(loop)):
        return False
    loop.compares_units = all(compares(loop, mode) for mode in MODES)
    # Where one of these is not right, the others do as well.
    asked: dict[str, int | None]
    for dtype, multiply in list(loop.multiply_halves.items()):
        asked = {"multiply_halves": multiply}
        if not _whole(loop, band=True, narrow=dtype, products=asked):
            del loop.multiply_halves[dtype]
    for dtype, multiply in list(loop.multiply_packed.items()):
        asked = {"multiply_packed": multiply, "release": loop.release}
        if not all(_whole(loop, band=b, narrow=dtype, products=asked) for b in (False, True)):
            del loop.multiply_packed[dtype]
    return True


def _absorbs(loop: Loop) -> bool:
    """Two tiles after each other, with hidden pairs, a row that sees nothing, NaN, infinity, large
    logits, and keys that fill no vector."""
    tiles = [_hard_rows(0), _hard_rows(1)]
    rows, keys, width = len(tiles[0]), len(tiles[0][0]), 3
    hidden = [row == 2 or key % 5 == 3 for row in range(rows) for key in range(keys)]
    table = (ctypes.c_bool * len(hidden))(*hidden)
    largest, total, energy = ((ctypes.c_float * rows)() for _ in range(3))
    mixed = _floats([1.0] * (rows * width))
    for tile, before in zip(tiles, (None, mixed), strict=True):
        s = _floats([x for row in tile for x in row])
        loop.fill_rows(s, table, 1, 1, 1, rows, 0, 0, 0, keys, keys, keys, -math.inf, 1)
        loop.absorb_rows(s, largest, total, energy, before, rows, keys, width, 1)
    good = True
    for row in range(rows):
        here = slice(row * keys, (row + 1) * keys)
        old, new = (
            [-math.inf if h else x for x, h in zip(tile[row], hidden[here], strict=True)]
            for tile in tiles
        )
        m, l, e = _sums(old + new)
        shrink = math.exp(_sums(old)[0] - m)
        given = [largest[row], total[row], energy[row], *s[here], *mixed[row * width :][:width]]
        wanted = [m, l, e, *(math.exp(x - m) for x in new), *[shrink] * width]
        good = good and _alike(given, wanted)
    return good


def _attends(loop: Loop) -> bool:
    """Whole calls, forward and backward, against their formulas: two heads that share keys, two
    row tiles (the second sees nothing), two cuts, the second with hidden pairs; and the same heads
    stacked under a band, with a sink; each also with a soft-cap and a bias."""
    return all(_whole(loop, band=b, more=m) for b in (False, True) for m in (False, True))


def _whole(
    loop: Loop,
    *,
    band: bool,
    narrow: torch.dtype | None = None,
    products: Mapping[str, int | None] | None = None,
    more: bool = False,
) -> bool:
    """With `narrow` numbers, by the given products of them; with more done to logits."""
    R, Q, K, D, E, split, hands = 2, 7, 21, 3, 2, 16, 2
    q, k, v, g = (
        _floats([round(90 * math.sin(3 + 5 * i * n)) / 64 for i in range(n)])
        for n in (R * Q * D, K * D, K * E, R * Q * E)
    )
    low, high = (-2, K - Q - 4) if band else (0, 0)
    hidden = [
        [not low <= j - i <= high if band else j >= split and (i + j) % 3 == 0 for j in range(K)]
        for i in range(Q)
    ]
    if not band:
        hidden[-1] = [True] * K
    table = (ctypes.c_bool * ((Q - 1) * (K - split)))(
        *(h for row in hidden[:-1] for h in row[split:])
    )
    tiles = array("l", (0, Q - 1, 0, 2, Q - 1, Q, 2, 2))
    cuts = array("l", (0, split, 0, 0, split, K, 0, 1))
    parts = array("l", (0, K - split, ctypes.addressof(table), 0, 0, 0, K - split))
    sink = _floats([0.5, -1.0])
    rest, largest, entropy, lse = (_floats([9.0] * (R * Q)) for _ in range(4))
    out, dq = _floats([9.0] * (R * Q * E)), _floats([9.0] * (R * Q * D))
    turned, n = narrow == torch.bfloat16 and "multiply_packed" in (products or {}), 2 * split
    dk, dv = (_floats([0.0] * (hands * (n if turned else K) * width)) for width in (D, E))
    shift, heat = (_floats([math.cos(n * i) for i in range(R * Q)]) for n in (3, 4))
    expected = _floats([0.0] * (R * Q))
    rows = R * Q if band else Q
    # Of distances, so that the next query begins one place earlier.
    cap, bias = 1.5, _floats([math.sin(2 + i) for i in range(R * (Q + K - 1))])
    biased = {
        "cap": cap, "bias": ctypes.addressof(bias) + 4 * (Q - 1),
        "bias_steps": (0, Q + K - 1, -1, 1),
    }  # fmt: skip
    # Room for whatever packed products reach beyond: 16 rows, 64 keys.
    scratch = _floats([0.0] * (16 * (4 * (split + 64) + 4 * D + 4 * E + 3)))
    shared: dict[str, Any] = {
        "multiply": loop.multiply, "B": 1, "G": 1, "R": R, "Q": Q, "K": K, "D": D, "E": E,
        "scale": 0.5, "stacked": band, "low": low, "high": high, "rows": rows, "keys": split,
        "q_steps": (R * Q * D, Q * D, D), "k_steps": (K * D, K * D, D),
        "v_steps": (K * E, K * E, E), "rows_step": R * Q, "scratch_step": len(scratch),
        "first_tile": 0, "last_tile": 1 if band else 2, **(biased if more else {}),
    }  # fmt: skip
    if not band:
        names = zip(("tiles", "cuts", "parts"), (tiles, cuts, parts), strict=True)
        shared |= {name: t.buffer_info()[0] for name, t in names}
    arrays: dict[str, Any] = {
        "q": q, "k": k, "v": v, "scratch": scratch, "lse": lse, "rest": rest, "out": out,
        "largest": largest, "entropy": entropy, "g": g, "shift": shift, "heat": heat,
        "expected": expected, "dq": dq, "dk": dk, "dv": dv,
    }  # fmt: skip
    if band:
        arrays["sink"] = sink
    if narrow is not None:
        # Numbers of few digits: narrow ones hold them as they are, and only weights are rounded.
        shared |= {"type": TYPES[narrow], "unpacked": True, **(products or {})}
        shared["whole_heads"] = band and "multiply_packed" in (products or {})
        for name in ("q", "k", "v"):
            arrays[f"{name}_halves"] = _narrow(list(arrays[name]), narrow)
            shared[f"{name}_half_steps"] = shared[f"{name}_steps"]
        packed = ("k_packed", "v_packed", "k_mixed", "v_compared")
        for name in packed if turned else packed[:2]:
            arrays[name] = (ctypes.c_uint16 * (n * 4))()
        arrays["out_halves"] = (ctypes.c_uint16 * len(out))()
        del arrays["out"]

    def filled(kind: type[Attend] | type[Pull], **more: Any) -> Any:
        call = kind(**shared, **more)
        for name, numbers in arrays.items():
            if hasattr(kind, name):
                setattr(call, name, ctypes.addressof(numbers))
        return call

    def attended() -> bool:
        call = filled(Attend)
        if not band:
            return loop.attend(call, 1)
        # As a call of a known kind.
        names = [f"{name}_halves" if narrow else name for name in ("q", "k", "v", "out")]
        names += ["largest", "entropy", "lse", "rest"]
        places = (ctypes.addressof(arrays[name]) for name in names)
        # What is hidden, and what is added, is that of this call.
        call.parts, own = 0, [parts.buffer_info()[0], call.bias or 0, *call.bias_steps]
        call.bias = 0
        return bool(loop.attend_again(AGAIN.pack(ctypes.addressof(call), *places, 0, *own, 1)))

    # A value that some rows may not see and that is no number must be noticed.
    values, place = arrays["v_halves" if narrow else "v"], split * E
    before, values[place] = values[place], 0x7FC0 if narrow else math.nan
    good = not attended()
    values[place] = before
    good = attended() and good
    if narrow is not None:
        out = _wide(arrays["out_halves"], narrow)
    for row in range(R * Q):
        expected[row] = lse[row] - entropy[row] if lse[row] > -math.inf else 0.0
    steps: dict[str, Any] = {
        "g_steps": (R * Q * E, Q * E, E),
        "dk_step": len(dk) // 2,
        "dv_step": len(dv) // 2,
    }
    pull_of_all = filled(Pull, **steps, key_heads=1, hands=hands)
    if band and narrow is None:
        # As one of a known kind, which nothing but the output is learned by.
        for row in range(R * Q):
            shift[row] = -sum(g[row * E + i] * out[row * E + i] for i in range(E))
            heat[row] = 0.0
        pull_of_all.shift = pull_of_all.heat = pull_of_all.expected = None
        pull_of_all.fresh = True
        dk[:], dv[:] = [9.0] * len(dk), [9.0] * len(dv)
        which = ("q", "k", "v", "g", "out", "lse", "rest", "dq", "dk", "dv", "scratch")
        places = [ctypes.addressof(arrays[name]) for name in which]
        known = PULL_AGAIN.pack(ctypes.addressof(pull_of_all), *places, *steps["g_steps"], 1)
        # A key that some rows may not see and that is no number must be noticed.
        before, k[split * D] = k[split * D], math.nan
        good = not loop.pull_again(known) and good
        k[split * D] = before
        good = bool(loop.pull_again(known)) and good
    else:
        loop.pull(pull_of_all, 1)
    want_dk, want_dv = [0.0] * (K * D), [0.0] * (K * E)
    within = 2**-5 if turned else 1e-5
    for row in range(R * Q):
        head, query = divmod(row, Q)
        s = [0.5 * sum(q[row * D + d] * k[j * D + d] for d in range(D)) for j in range(K)]
        slopes = [1.0] * K
        if more:
            slopes = [1 - math.tanh(x / cap) ** 2 for x in s]
            near = bias[head * (Q + K - 1) + Q - 1 - query :][:K]
            s = [cap * math.tanh(x / cap) + near[j] for j, x in enumerate(s)]
        s = [-math.inf if h else x for x, h in zip(s, hidden[query], strict=True)]
        terms = [*s, sink[head]] if band else s
        m, l, e = _sums(terms)
        p = [math.exp(x - m) / (l or 1.0) for x in terms]
        mean = [sum(p[j] * v[j * E + i] for j in range(K)) for i in range(E)]
        seen = max(s)
        given = [lse[row] + rest[row], largest[row], entropy[row], *out[row * E :][:E]]
        wanted = [m + math.log(l), seen, math.log(l) - e / l, *mean] if l else [
            -math.inf, -math.inf, 0.0, *mean,
        ]  # fmt: skip
        good = good and _alike(given[:3], wanted[:3])
        good = good and _alike(given[3:], wanted[3:], 2**-7 if narrow else 1e-5)
        want_dq = [0.0] * D
        for j in range(K):
            if hidden[query][j]:
                continue
            pull = sum(g[row * E + i] * v[j * E + i] for i in range(E)) + shift[row]
            ds = p[j] * (pull - heat[row] * (s[j] - expected[row]))
            ds_q = 0.5 * ds * slopes[j]
            for d in range(D):
                want_dq[d] += ds_q * k[j * D + d]
                want_dk[j * D + d] += ds_q * q[row * D + d]
            for i in range(E):
                want_dv[j * E + i] += p[j] * g[row * E + i]
        good = good and _alike(dq[row * D :][:D], want_dq, within)
    for twice, wanted, width, factor in ((dk, want_dk, D, 0.5), (dv, want_dv, E, 1.0)):
        hand = len(twice) // hands
        total = [a + b for a, b in zip(twice[:hand], twice[hand:], strict=True)]
        if turned:
            total = [factor * total[d * n + j] for j in range(K) for d in range(width)]
        good = good and _alike(total, wanted, within)
    return good


def _hard_rows(which: int) -> list[list[float]]:
    """Rows of logits that are hard in different ways, as numbers that float32 holds exactly."""
    plain = [round(200 * math.sin(7 * key + which)) / 64 for key in range(37)]
    odd = 30 + which
    return [
        plain,
        [1024 * x for x in plain],
        plain,  # hidden
        [x - 100 * which for x in plain],
        [*plain[:odd], math.nan, *plain[odd + 1 :]],
        [*plain[:odd], math.inf, *plain[odd + 1 :]],
    ]


def _narrow(numbers: Sequence[float], dtype: torch.dtype) -> ctypes.Array[ctypes.c_uint16]:
    """Numbers that a narrow type holds as they are, in it."""
    if dtype == torch.float16:
        return (ctypes.c_uint16 * len(numbers)).from_buffer_copy(
            struct.pack(f"{len(numbers)}e", *numbers)
        )
    both = (ctypes.c_uint16 * (2 * len(numbers))).from_buffer_copy(_floats(numbers))
    return (ctypes.c_uint16 * len(numbers))(*both[1::2])


def _wide(
    numbers: ctypes.Array[ctypes.c_uint16], dtype: torch.dtype
) -> ctypes.Array[ctypes.c_float]:
    """The same numbers in float32."""
    if dtype == torch.float16:
        return _floats(struct.unpack(f"{len(numbers)}e", numbers))
    both = [half for number in numbers for half in (0, number)]
    return (ctypes.c_float * len(numbers)).from_buffer_copy((ctypes.c_uint16 * len(both))(*both))


def _floats(numbers: Sequence[float]) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(numbers))(*numbers)


def _sums(s: Sequence[float]) -> tuple[float, float, float]:
    """m, l and e of a row."""
    m = math.nan if any(map(math.isnan, s)) else max(*s, LEAST)
    x = [one - m for one in s]
    energy = math.fsum(math.exp(one) * one for one in x if one != -math.inf)
    return m, math.fsum(map(math.exp, x)), energy


def _alike(given: Sequence[float], wanted: Sequence[float], within: float = 1e-5) -> bool:
    return all(
        math.isclose(a, b, rel_tol=within, abs_tol=within) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(given, wanted, strict=True)
    )
