"""Closed forms against counting every pair, for every mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from regard import cost, masks
from regard.cost.parts import pairs
from regard.inputs import check
from regard.masks import algebra
from regard.values import Shape
from tests.parity.cases import MASKS, Sizes

SIZES = [Sizes(2, 4, 2, 63, 63, 8, 8), Sizes(1, 2, 1, 17, 111, 8, 8), Sizes(2, 2, 2, 70, 40, 8, 8)]
TILES = [(16, 16), (8, 32), (128, 128)]


def written(mask: masks.Mask | None, s: Sizes) -> Tensor:
    """Every pair of every batch entry and head."""
    if mask is None:
        return torch.ones(s.B, s.H, s.Q, s.K, dtype=torch.bool)
    bound = mask.bind(Shape(s.B, s.H, s.Q, s.K), torch.device("cpu"))
    table = algebra.pairs(bound, torch.arange(s.Q), torch.arange(s.K))
    return table.expand(s.B, s.H, s.Q, s.K)


def visited(table: Tensor, rows: int, keys: int) -> int:
    """Pairs of all tiles that hold an allowed pair, one tile at a time."""
    total = 0
    for head in table.flatten(0, 1):
        for strip in head.split(rows, 0):
            total += sum(tile.numel() for tile in strip.split(keys, 1) if tile.any())
    return total


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_is_counted_exactly(name: str, sizes: Sizes, tile: tuple[int, int]) -> None:
    s = sizes
    if name == "documents" and s.Q > s.K:
        pytest.skip("queries beyond the keys belong to no document")
    mask = MASKS[name](s)
    table = written(mask, s)
    q = torch.empty(s.B, s.H, s.Q, s.D, device="meta")
    k = torch.empty(s.B, s.G, s.K, s.D, device="meta")
    found = cost.call(q, k, k, mask=mask, tile=tile)
    scores, mixed = found.part("scores"), found.part("weighted sum")
    needed = int(table.sum())
    assert scores.macs == (needed * s.D, visited(table, *tile) * s.D, table.numel() * s.D)
    assert mixed.macs == scores.macs
    assert found.flops("needed") == 4 * needed * s.D


@given(
    n=some.integers(1, 200), left=some.integers(0, 250), rows=some.integers(1, 64),
    keys=some.integers(1, 64),
)  # fmt: skip
def test_needed_executed_and_dense_are_ordered(n: int, left: int, rows: int, keys: int) -> None:
    q = torch.empty(1, 2, n, 4, device="meta")
    x = check(
        q, q, q, mask=masks.causal() & masks.window(left), score=None, bias=None, softcap=None,
        sink=None, scale=None, dropout=0.0, training=False,
    )  # fmt: skip
    needed, executed, dense = pairs(x, (rows, keys))
    seen = min(left + 1, n)
    assert needed == 2 * (seen * n - seen * (seen - 1) // 2)
    assert needed <= executed <= dense == 2 * n * n
    assert pairs(x, (1, 1)).executed == needed
    assert pairs(x, (n, n)).executed == dense


def test_widths_of_keys_and_values_count_apart() -> None:
    q, k = (torch.empty(2, 4, 10, 16, device="meta") for _ in range(2))
    v = torch.empty(2, 4, 10, 24, device="meta")
    found = cost.call(q, k, v)
    assert found.part("scores").macs.dense == 2 * 4 * 10 * 10 * 16
    assert found.part("weighted sum").macs.dense == 2 * 4 * 10 * 10 * 24
