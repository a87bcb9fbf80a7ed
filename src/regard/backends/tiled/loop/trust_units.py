"""Whether the compiled functions for additive attention give what tanh gives."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from regard.backends.tiled.loop.compiled import Loop, Units

MODES = {0: 0.3, 1: 3.0, 2: 50.0}
"""The ways to make tanh, as units.c counts them, and how large queries and keys are for each."""


def compares(loop: Loop, mode: int) -> bool:
    """Forward and backward: two heads that share keys, and numbers of keys and units that fill no
    vector."""
    R, Q, K, D = 2, 3, 21, 5
    size = MODES[mode]
    q, k, w, d = (
        [round(64 * math.sin(3 + 5 * i * n)) / 64 * scale for i in range(n)]
        for n, scale in ((R * Q * D, size), (K * D, size), (R * D, 1.0), (R * Q * K, 1.0))
    )
    through = (math.tanh, lambda x: math.exp(2 * x), lambda x: x)[mode]
    turned = [through(k[j * D + u]) for u in range(D) for j in range(K)]
    given = {
        "q": _floats([through(x) for x in q]),
        "k": _floats(turned),
        "w": _floats(w),
        "d": _floats(d),
        "logits": _floats([9.0] * (R * Q * K)),
        "dq": _floats([9.0] * (R * Q * D)),
        "dk": _floats([0.0] * (D * K)),
        "dw": _floats([9.0] * (R * D)),
    }
    call = Units(
        **{name: ctypes.addressof(t) for name, t in given.items()},
        B=1, G=1, R=R, Q=Q, K=K, D=D, k_head=D * K, k_unit=K, w_head=D, mode=mode,
    )  # fmt: skip
    loop.compare_units(call, 1)
    loop.pull_units(call, 1)
    s, dq, dk, dw = [0.0] * (R * Q * K), [0.0] * (R * Q * D), [0.0] * (D * K), [0.0] * (R * D)
    for row in range(R * Q):
        for j in range(K):
            g = d[row * K + j]
            for u in range(D):
                t, weight = math.tanh(q[row * D + u] + k[j * D + u]), w[row // Q * D + u]
                slope = g * weight * (1 - t * t)
                s[row * K + j] += weight * t
                dq[row * D + u] += slope
                dk[u * K + j] += slope
                dw[row // Q * D + u] += g * t
    wanted = {"logits": s, "dq": dq, "dk": dk, "dw": dw}
    return all(_alike(list(given[name]), right) for name, right in wanted.items())


def _alike(given: Sequence[float], wanted: Sequence[float]) -> bool:
    return all(
        math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5) for a, b in zip(given, wanted, strict=True)
    )


def _floats(numbers: Sequence[float]) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(numbers))(*numbers)
