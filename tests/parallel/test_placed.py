"""Masks of a whole sequence, for queries that stand at some of its places."""

from __future__ import annotations

import pytest
import torch

from regard import masks, parallel
from regard.masks.tiles import EMPTY, FULL, count, grid
from regard.parallel.placed import PlacedMask, placed_mask
from regard.values import Shape

N, KEYS, TILE = 300, 340, 16
IDS = torch.arange(KEYS) // 37
TABLE = torch.rand(1, 2, N, KEYS, generator=torch.Generator().manual_seed(0)) < 0.5
MASKS = [
    masks.causal(),
    masks.window(40, 3),
    masks.documents(IDS),
    masks.causal() & masks.documents(IDS) & masks.padding([200, 340]),
    ~masks.window(20, 20) | masks.prefix(7),
    masks.dilated(3) & masks.causal(),
    masks.keep(TABLE),
    masks.global_tokens([0, 290]) | masks.window(5, 5),
    masks.where(lambda b, h, q, k: (q * k) % 7 < 3),
]
LAYOUTS = [
    parallel.contiguous(N, 4),
    parallel.zigzag(N, 4),
    parallel.by_document([100, 7, 193], 4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_a_placed_mask_is_some_rows_of_the_mask(mask: masks.Mask, layout: parallel.Layout) -> None:
    bound = mask.bind(Shape(2, 2, N, KEYS), torch.device("cpu"))
    dense = mask.dense(N, KEYS).expand(2, 2, N, KEYS)
    for rank in (0, 2):
        places = layout.positions(rank)
        runs = layout.runs[rank]
        start = runs[0][0] if len(runs) == 1 else None
        placed = placed_mask(bound, places, N, start)
        assert placed is not None
        true, n = dense[:, :, places], len(places)
        shape = Shape(2, 2, n, KEYS)
        part = Shape(placed.batch, placed.heads, n, KEYS)
        own = true[: placed.batch, : placed.heads]
        b, h = torch.arange(2).view(-1, 1, 1, 1), torch.arange(2).view(-1, 1, 1)
        found = placed.allows(b, h, torch.arange(n)[:, None], torch.arange(KEYS))
        assert torch.equal(found.expand(2, 2, n, KEYS), true)
        assert count(placed, part, torch.device("cpu")) == own.sum()
        tiles = grid(placed, part, TILE, TILE, torch.device("cpu"), exact=False)
        for i, j in ((0, 0), (1, 3), (n // TILE - 1, 20), (2, 11)):
            inside = own[:, :, i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
            state = tiles[:, :, i, j]
            assert inside[state == FULL].all()
            assert not inside[state == EMPTY].any()
        band, spans = placed.band(), placed.spans(shape, torch.device("cpu"))
        if band is not None:
            distance = torch.arange(KEYS) - torch.arange(n)[:, None]
            assert torch.equal((distance >= band[0]) & (distance <= band[1]), true[0, 0])
        if spans is not None and spans.sure:
            k = torch.arange(KEYS)
            run = (k >= spans.first[..., None]) & (k < spans.stop[..., None])
            assert torch.equal(run.expand(2, 2, n, KEYS), true)


def test_bands_and_runs_are_still_known_as_such() -> None:
    """Kernels that need no look at every pair are lost otherwise."""
    bound = masks.causal().bind(Shape(1, 1, N, N), torch.device("cpu"))
    one = placed_mask(bound, torch.arange(100, 200), N, 100)
    assert one is not None
    assert one.band() == (-torch.inf, 100)
    two = placed_mask(bound, parallel.zigzag(N, 4).positions(1), N, None)
    assert isinstance(two, PlacedMask)
    assert two.band() is None
    spans = two.spans(Shape(1, 1, 75, N), torch.device("cpu"))
    assert spans is not None
    assert bool(spans.sure)
