"""Whether the compiled functions give what the formulas of forward.py give.

Asked once, before they are used. In plain Python, because tensors may be fake or live on another
device by default.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence

from regard.backends.tiled.compiled import Loop, Wave

LEAST = -(2 - 2**-23) * 2.0**125
"""A quarter of the least float32: the maximum of rows that have seen nothing."""


def trusted(loop: Loop) -> bool:
    """Whether a compiled loop may be used."""
    return _absorbs(loop) and (loop.multiply is None or _attends(loop))


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
    """Two heads that share keys, two row tiles (the second sees nothing), two cuts, the second
    with hidden pairs."""
    R, Q, K, D, E, split = 2, 7, 21, 3, 2, 16
    q, k, v = (
        _floats([round(90 * math.sin(3 + 5 * i * n)) / 64 for i in range(n)])
        for n in (R * Q * D, K * D, K * E)
    )
    hidden = [[(i + j) % 3 == 0 for j in range(K - split)] for i in range(Q - 1)]
    table = (ctypes.c_bool * (len(hidden) * (K - split)))(*(h for row in hidden for h in row))
    tiles = array("l", (0, Q - 1, 0, 2, Q - 1, Q, 2, 2))
    cuts = array("l", (0, split, 0, 0, split, K, 0, 1))
    parts = array("l", (0, K - split, ctypes.addressof(table), 0, 0, 0, K - split))
    largest, total, energy = ((ctypes.c_float * (R * Q))() for _ in range(3))
    means = _floats([9.0] * (R * Q * E))
    scratch = _floats([0.0] * (Q * (split + D)))
    wave = Wave(
        multiply=loop.multiply, B=1, G=1, R=R, Q=Q, D=D, E=E, scale=0.5, n_tiles=2,
        q_steps=(R * Q * D, Q * D, D), k_steps=(K * D, K * D, D), v_steps=(K * E, K * E, E),
        sums_step=R * Q, scratch_step=len(scratch),
    )  # fmt: skip
    arrays = {"q": q, "k": k, "v": v, "largest": largest, "total": total, "energy": energy}
    for name, numbers in (arrays | {"means": means, "scratch": scratch}).items():
        setattr(wave, name, ctypes.addressof(numbers))
    wave.tiles, wave.cuts, wave.parts = (t.buffer_info()[0] for t in (tiles, cuts, parts))
    good = loop.attend(wave, 1)
    for row in range(R * Q):
        covered = [*[False] * split, *hidden[row % Q]] if row % Q < Q - 1 else [True] * K
        s = [0.5 * sum(q[row * D + d] * k[j * D + d] for d in range(D)) for j in range(K)]
        s = [-math.inf if h else x for x, h in zip(s, covered, strict=True)]
        m, l, e = _sums(s)
        p = [math.exp(x - m) / (l or 1.0) for x in s]
        mean = [sum(weight * v[j * E + i] for j, weight in enumerate(p)) for i in range(E)]
        given = [largest[row], total[row], energy[row], *means[row * E :][:E]]
        good = good and _alike(given, [m, l, e, *mean])
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


def _floats(numbers: Sequence[float]) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(numbers))(*numbers)


def _sums(s: Sequence[float]) -> tuple[float, float, float]:
    """m, l and e of a row."""
    m = math.nan if any(map(math.isnan, s)) else max(*s, LEAST)
    x = [one - m for one in s]
    energy = math.fsum(math.exp(one) * one for one in x if one != -math.inf)
    return m, math.fsum(map(math.exp, x)), energy


def _alike(given: Sequence[float], wanted: Sequence[float]) -> bool:
    return all(
        math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(given, wanted, strict=True)
    )
