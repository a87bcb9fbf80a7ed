"""Whether all answers about one trace are about the same weights."""

from __future__ import annotations

import math
from typing import Any

from torch.testing import assert_close

import regard
from regard.backends.exactness import SURE

NEAR: dict[str, Any] = {"rtol": 2 * SURE, "atol": 1e-6}
"""Two answers, each of which may be off by as much."""


def assert_one_answer(t: regard.Trace) -> None:
    """Every question about a pair gets one answer, and none is more than a share."""
    p = t.weights()
    given = p.sum(-1)
    assert given.max() <= 1 + SURE
    if t.inputs.sink is None:
        assert_close(given, (t.lse > -math.inf).to(given), **NEAR)
    Q, K = p.shape[2:]
    some_q, some_k = list(range(0, Q, 3)), list(range(0, K, 4))
    assert_close(t.weights(queries=some_q), p[:, :, some_q], **NEAR)
    assert_close(t.weights(keys=some_k), p[..., some_k], **NEAR)
    assert_close(t.weights(queries=[0], keys=[0], heads=[1]), p[:, 1:2, :1, :1], **NEAR)
    assert_close(t[-1, [0]].weights(), p[-1:, :1], **NEAR)
    assert_close(t.mass(0), p[..., 0], **NEAR)
    assert_close(t.mass(some_k), p[..., some_k].sum(-1), **NEAR)
    assert_close(t.received(), p.sum(-2), **NEAR)
    assert_close(t.map((Q, K)), p, **NEAR)
    assert_close(t.map(4, pool="max").amax((-1, -2)), p.amax((-1, -2)), **NEAR)
    top = t.top(3)
    assert_close(top.values, p.topk(min(3, K), -1).values, **NEAR)
    picked = p.gather(-1, top.indices.clamp_min(0))
    assert_close(top.values, picked.masked_fill(top.indices < 0, 0.0), **NEAR)
