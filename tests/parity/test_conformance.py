"""Every backend × score × mask × bias × precision that it accepts, against float64.

Outputs, row statistics, every question a trace answers, and all gradients.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from regard.backends.reference import Reference, ReferencePass
from regard.backends.sdpa import Sdpa
from regard.backends.tiled import Tiled, TiledPass, walk
from regard.backends.tiled.walk import TileSize, slabs
from tests.parity.agreement import assert_as_exact_as_plain
from tests.parity.cases import (
    BIASES,
    DTYPES,
    EXTRAS,
    MASKS,
    SCORES,
    Case,
    Sizes,
    observed,
    truth_and_plain,
)


def every_case(sizes: Sizes) -> list[Case]:
    """The whole product; soft-cap, sink and dropout take turns so that each meets each."""
    found = []
    extras = list(EXTRAS)
    product = itertools.product(
        enumerate(MASKS), enumerate(SCORES), enumerate(BIASES), enumerate(DTYPES)
    )
    for (i, mask), (j, score), (n, bias), (m, dtype) in product:
        extra = extras[(i + 2 * j + 3 * n + m) % len(extras)]
        found.append(Case(mask, score, bias, extra, dtype, sizes))
    return found


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that every case has several slabs, row tiles and cuts."""
    monkeypatch.setattr(walk, "KEY_TILE", 8)
    monkeypatch.setattr("regard.backends.tiled.walk.tile_size", lambda x: TileSize(1, 10, 16))
    monkeypatch.setattr("regard.backends.tiled.forward.tile_size", lambda x: TileSize(1, 10, 16))


def test_small_tiles_are_many(small_tiles: None) -> None:
    inputs, _ = Case(mask="causal").build()
    walked = [[tile.cuts for tile in slab.row_tiles()] for slab in slabs(inputs)]
    assert len(walked) == 4
    assert all(len(rows) == 3 for rows in walked)
    assert max(len(cuts) for rows in walked for cuts in rows) >= 3


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", every_case(Sizes()), ids=str)
def test_tiled(case: Case) -> None:
    inputs, learned = case.build()
    got = observed(Tiled(), inputs, learned, TiledPass())
    truth, plain = truth_and_plain(case, ReferencePass())
    assert_as_exact_as_plain(got, plain, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", ["causal_padding", "keep"])
def test_reference_in_low_precision(mask: str, extra: str, dtype: torch.dtype) -> None:
    case = Case(mask, "scaled_dot", "alibi", extra, dtype)
    inputs, learned = case.build()
    got = observed(Reference(), inputs, learned, ReferencePass())
    truth, plain = truth_and_plain(case, ReferencePass())
    assert_as_exact_as_plain(got, plain, truth)


SQUARE = Sizes(E=8)
SDPA_CASES = [
    case
    for sizes in (SQUARE, replace(SQUARE, Q=37))
    for case in every_case(sizes)
    if not Sdpa().refuses(replace(case, extra="plain").build()[0], statistics=False)
]


@pytest.mark.parametrize("case", [replace(c, extra="plain") for c in SDPA_CASES], ids=str)
def test_sdpa(case: Case) -> None:
    inputs, learned = case.build()
    got = observed(Sdpa(), inputs, learned, None)
    truth, plain = truth_and_plain(case, None)
    assert_as_exact_as_plain(got, plain, truth)


def test_sdpa_takes_what_it_should() -> None:
    accepted = {(case.mask, case.score) for case in SDPA_CASES}
    assert {(mask, "scaled_dot") for mask in MASKS} <= accepted
    assert ("none", "general") in accepted
    assert not any(score in ("additive", "distance") for _, score in accepted)


@pytest.mark.parametrize("mask", ["none", "causal", "documents", "longformer", "keep"])
@pytest.mark.parametrize("extra", ["plain", "all"])
def test_tiled_with_its_own_tiles(mask: str, extra: str) -> None:
    """Lengths past one tile of the sizes that are really used, none of them a multiple."""
    sizes = Sizes(B=1, H=2, G=1, Q=1111, K=2333, D=16, E=8)
    case = Case(mask, "scaled_dot", "none", extra, torch.float32, sizes)
    inputs, learned = case.build()
    tiles = [tile for slab in slabs(inputs) for tile in slab.row_tiles()]
    assert len(tiles) > 1
    got = observed(Tiled(), inputs, learned, TiledPass())
    truth, plain = truth_and_plain(case, ReferencePass())
    assert_as_exact_as_plain(got, plain, truth)
