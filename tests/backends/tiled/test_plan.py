"""How a call is cut: what is one tile, and what is worth another thread."""

from __future__ import annotations

import pytest
import torch

from regard import masks
from regard.backends.tiled import plan
from regard.backends.tiled.loop import loop_for
from regard.backends.tiled.plan import Plan
from regard.inputs import AttentionInputs, check

LOOP = loop_for(torch.device("cpu"), torch.float32)
pytestmark = pytest.mark.skipif(LOOP is None or not LOOP.multiply, reason="no compiled loop")


def planned(B: int, H: int, G: int, Q: int, K: int, mask: masks.Mask | None = None) -> Plan:
    assert LOOP is not None
    k = torch.empty(B, G, K, 64)
    x: AttentionInputs = check(
        torch.empty(B, H, Q, 64), k, k, mask=mask, score=None, bias=None, softcap=None, sink=None,
        scale=None, dropout=0.0, training=False,
    )  # fmt: skip
    return Plan.of(x, LOOP)


@pytest.mark.parametrize(
    ("sizes", "threads"),
    [
        ((1, 8, 8, 1, 500), 3),
        ((1, 8, 8, 1, 100), 1),
        # Rows of several heads are multiplied at once, and one head has nobody to share with.
        ((1, 8, 2, 1, 500), 1),
        ((1, 1, 1, 1, 3000), 1),
        ((1, 8, 8, 2, 200), 1),
        ((1, 8, 8, 64, 64), 3),
    ],
)
def test_single_rows_wake_no_threads_by_themselves(
    sizes: tuple[int, int, int, int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan.torch, "get_num_threads", lambda: 3)
    assert planned(*sizes).threads == threads


@pytest.mark.parametrize(
    ("batch", "n", "mask", "rows"),
    [
        (1, 200, masks.dilated(4), 256),
        (4, 256, masks.documents(torch.arange(256) // 9), 128),
        (1, 256, masks.documents(torch.arange(256) // 9), 256),
        (1, 257, masks.dilated(4), 128),
        (1, 200, masks.causal(), 128),
        (1, 200, None, 128),
    ],
)
def test_short_texts_under_masks_that_must_be_asked_are_one_tile(
    batch: int, n: int, mask: masks.Mask | None, rows: int
) -> None:
    assert planned(batch, 16, 16, n, n, mask).rows == rows
