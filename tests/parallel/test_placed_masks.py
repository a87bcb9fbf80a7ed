"""Masks of a whole sequence, for queries and keys that stand at some of its places."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from regard import biases, masks, parallel
from regard.masks.tiles import EMPTY, FULL, count, grid
from regard.parallel.placed_masks import PlacedMask, SomeKeys, placed_bias, placed_mask
from regard.values import Shape
from tests.fresh_process import FreshProcesses

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
    everything = parallel.contiguous(KEYS, 1)
    cut = {"contiguous": parallel.contiguous(KEYS, 3), "zigzag": parallel.zigzag(KEYS, 3)}
    some = cut.get(repr(layout).split("(")[0], parallel.by_document([40, 300], 3))
    for rank, keys, owner in ((0, everything, 0), (2, everything, 0), (1, some, 0), (3, some, 2)):
        _assert_placed(mask, layout, rank, keys, owner)


def _assert_placed(
    mask: masks.Mask, layout: parallel.Layout, rank: int, keys: parallel.Layout, owner: int
) -> None:
    bound = mask.bind(Shape(2, 2, N, KEYS), torch.device("cpu"))
    places, there = layout.positions(rank), keys.positions(owner)
    runs, others = layout.runs[rank], keys.runs[owner]
    start = runs[0][0] - others[0][0] if len(runs) == len(others) == 1 else None
    placed = placed_mask(
        bound, places, N, start, None if keys.ranks == 1 else SomeKeys(there, KEYS)
    )
    assert placed is not None
    true = mask.dense(N, KEYS).expand(2, 2, N, KEYS)[:, :, places][..., there]
    n, m = true.shape[2:]
    shape = Shape(2, 2, n, m)
    part = Shape(placed.batch, placed.heads, n, m)
    own = true[: placed.batch, : placed.heads]
    b, h = torch.arange(2).view(-1, 1, 1, 1), torch.arange(2).view(-1, 1, 1)
    found = placed.allows(b, h, torch.arange(n)[:, None], torch.arange(m))
    assert torch.equal(found.expand(2, 2, n, m), true)
    assert count(placed, part, torch.device("cpu")) == own.sum()
    tiles = grid(placed, part, TILE, TILE, torch.device("cpu"), exact=False)
    for i, j in ((0, 0), (1, 3), (n // TILE - 1, m // TILE - 1), (2, 4)):
        inside = own[:, :, i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
        state = tiles[:, :, i, j]
        assert inside[state == FULL].all()
        assert not inside[state == EMPTY].any()
    band, spans = placed.band(), placed.spans(shape, torch.device("cpu"))
    if band is not None:
        distance = torch.arange(m) - torch.arange(n)[:, None]
        assert torch.equal((distance >= band[0]) & (distance <= band[1]), true[0, 0])
    if spans is not None and spans.sure:
        k = torch.arange(m)
        run = (k >= spans.first[..., None]) & (k < spans.stop[..., None])
        assert torch.equal(run.expand(2, 2, n, m), true)


@pytest.mark.parametrize(
    "bias",
    [
        biases.alibi([0.5, 0.1]),
        biases.relative(torch.randn(2, 9, generator=torch.Generator().manual_seed(1))),
        biases.dense(torch.randn(1, 2, N, KEYS, generator=torch.Generator().manual_seed(2))),
    ],
    ids=repr,
)
def test_a_placed_bias_is_a_part_of_the_bias(bias: biases.Bias) -> None:
    bound = bias.bind(Shape(1, 2, N, KEYS), torch.device("cpu"))
    whole = bound.at(torch.arange(N), torch.arange(KEYS))
    for layout, keys in ((LAYOUTS[0], parallel.contiguous(KEYS, 3)), (LAYOUTS[1],) * 2):
        places, there = layout.positions(2), keys.positions(1)
        start = int(places[0] - there[0]) if layout is LAYOUTS[0] else None
        placed = placed_bias(bound, places, start, SomeKeys(there, KEYS))
        assert placed is not None
        found = placed.at(torch.arange(len(places)), torch.arange(len(there)))
        assert torch.equal(found, whole[:, :, places][..., there])


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


def test_slopes_are_as_wide_as_the_call(fresh: FreshProcesses, tmp_path: Path) -> None:
    """Narrower ones would round their products with distances, as they do not on one device."""
    done = fresh(f"""
import torch
import regard
from torch.distributed.device_mesh import init_device_mesh
torch.distributed.init_process_group(
    "gloo", init_method="file://{tmp_path}/meeting", rank=0, world_size=1
)
mesh = init_device_mesh("cpu", (1,))
q = torch.randn(1, 4, 71, 8, dtype=torch.float64)
bias = regard.biases.alibi(torch.tensor([0.1, 0.3, 0.7, 0.017]))
there = regard.parallel.attention(q, q, q, mesh=mesh, bias=bias)
print(float((there - regard.attention(q, q, q, bias=bias)).abs().max()))
""")
    assert done.code == 0, done.err
    assert float(done.out) < 1e-12
