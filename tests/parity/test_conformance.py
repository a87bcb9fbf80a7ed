"""Every backend with scores, masks, biases and precisions that it accepts, against float64.

Outputs, row statistics, every question a trace answers, and all gradients. Any two kinds of mask,
score, bias, extra and precision meet; with --whole any three.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from regard.backends.reference import Reference, ReferencePass
from regard.backends.sdpa import Sdpa
from regard.backends.tiled import Tiled, TiledPass, tiles
from regard.backends.tiled.tiles import TileSize, slabs
from tests.parity import cases
from tests.parity.cases import (
    BIASES,
    DTYPES,
    EXTRAS,
    MASKS,
    SCORES,
    Case,
    Sizes,
    assert_conforms,
    observed,
)


def every_case(sizes: Sizes) -> list[Case]:
    """Masks, scores and biases in full; precisions and extras take turns so that any three kinds
    of all five meet in every way."""
    extras, found = list(EXTRAS), []
    product = itertools.product(enumerate(MASKS), enumerate(SCORES), enumerate(BIASES))
    for (i, mask), (j, score), (n, bias) in product:
        dtype = DTYPES[(i + j + n) % len(DTYPES)]
        extra = extras[(i + 2 * j + 3 * n) % len(extras)]
        found.append(Case(mask, score, bias, extra, dtype, sizes))
    return found


def every_pair(sizes: Sizes) -> list[Case]:
    """Masks and scores in full; the others take turns so that any two kinds meet in every way."""
    biases, extras, found = list(BIASES), list(EXTRAS), []
    for (i, mask), (j, score) in itertools.product(enumerate(MASKS), enumerate(SCORES)):
        bias, extra = biases[(i + j) % len(biases)], extras[(i + 2 * j) % len(extras)]
        found.append(Case(mask, score, bias, extra, DTYPES[(i + j) % len(DTYPES)], sizes))
    return found


def chosen(sizes: Sizes) -> list[Case]:
    return every_case(sizes) if cases.WHOLE else every_pair(sizes)


@pytest.mark.parametrize(("table", "many"), [(every_pair, 2), (every_case, 3)])
def test_so_many_meet(table: Callable[[Sizes], list[Case]], many: int) -> None:
    kinds = {"mask": MASKS, "score": SCORES, "bias": BIASES, "extra": EXTRAS, "dtype": DTYPES}
    for names in itertools.combinations(kinds, many):
        met = {tuple(getattr(case, name) for name in names) for case in table(Sizes())}
        assert len(met) == math.prod(len(kinds[name]) for name in names), names


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that every case has several slabs, row tiles and cuts."""
    monkeypatch.setattr(tiles, "KEY_TILE", 8)
    monkeypatch.setattr(tiles, "LITTLE", 0)
    monkeypatch.setattr(tiles, "LITTLE_IN_TILES", 0)
    monkeypatch.setattr("regard.backends.tiled.tiles.tile_size", lambda x: TileSize(2, 14, 16))
    monkeypatch.setattr("regard.backends.tiled.forward.tile_size", lambda x: TileSize(2, 14, 16))
    monkeypatch.setattr("regard.backends.tiled.plan.fused_size", lambda x: TileSize(2, 14, 16))


def test_small_tiles_are_many(small_tiles: None) -> None:
    inputs, _ = Case(mask="causal").build()
    walked = [[tile.cuts for tile in slab.row_tiles()] for slab in slabs(inputs)]
    assert len(walked) == 2
    assert all(len(rows) == 2 for rows in walked)
    assert max(len(cuts) for rows in walked for cuts in rows) == 3
    assert any(cut.partial for rows in walked for cuts in rows for cut in cuts)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", chosen(Sizes()), ids=str)
def test_tiled(case: Case) -> None:
    inputs, learned = case.build()
    got = observed(Tiled(), inputs, learned, TiledPass())
    assert_conforms(case, got, ReferencePass())


# What is in float64 is never compiled: those cases have run above.
UNCOMPILED = [replace(c, dtype=torch.float32) for c in chosen(Sizes()) if c.dtype != torch.float64]


@pytest.mark.usefixtures("small_tiles", "uncompiled")
@pytest.mark.parametrize("case", UNCOMPILED, ids=str)
def test_tiled_without_the_compiled_loop(case: Case) -> None:
    inputs, learned = case.build()
    got = observed(Tiled(), inputs, learned, TiledPass())
    assert_conforms(case, got, ReferencePass())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", ["causal_padding", "keep"])
def test_reference_in_low_precision(mask: str, extra: str, dtype: torch.dtype) -> None:
    case = Case(mask, "scaled_dot", "alibi", extra, dtype)
    inputs, learned = case.build()
    got = observed(Reference(), inputs, learned, ReferencePass())
    assert_conforms(case, got, ReferencePass())


UNFUSED = "none of its fused CUDA kernels takes this call"
SQUARE = Sizes(E=8)
SHAPES = (SQUARE, replace(SQUARE, Q=37))
FUSED = ("scaled_dot", "general", "cosine")


def every_sdpa_case() -> list[Case]:
    return [
        Case(mask, score, bias, "plain", dtype, sizes)
        for sizes in SHAPES
        for mask in MASKS
        for score in FUSED
        for bias in (("none", "dense") if mask == "none" else ("none",))
        for dtype in DTYPES
    ]


def every_sdpa_pair() -> list[Case]:
    """Masks, and a bias in the place of one, meet precisions, scores and shapes."""
    found = []
    masked = [("none", "dense"), *((mask, "none") for mask in MASKS)]
    for (i, (mask, bias)), (j, dtype) in itertools.product(enumerate(masked), enumerate(DTYPES)):
        score, sizes = FUSED[(i + j) % len(FUSED)], SHAPES[(i + j) % len(SHAPES)]
        found.append(Case(mask, score, bias, "plain", dtype, sizes))
    return found


SDPA_CASES = every_sdpa_case() if cases.WHOLE else every_sdpa_pair()


def test_all_pairs_meet_in_sdpa() -> None:
    kinds: dict[str, Callable[[Case], Any]] = {
        "masked": lambda c: (c.mask, c.bias),
        "score": lambda c: c.score,
        "dtype": lambda c: c.dtype,
        "sizes": lambda c: c.sizes,
    }
    for one, other in itertools.combinations(kinds.values(), 2):
        few, all_of_them = (
            {(one(case), other(case)) for case in table}
            for table in (every_sdpa_pair(), every_sdpa_case())
        )
        assert few == all_of_them


@pytest.mark.parametrize("case", SDPA_CASES, ids=str)
def test_sdpa(case: Case) -> None:
    inputs, learned = case.build()
    if case.bias == "dense":
        # Its fused kernels take a bias only as a constant.
        inputs = replace(inputs, bias=inputs.bias.detach())
    refused = Sdpa().refuses(inputs, statistics=False)
    if cases.DEVICE == "cuda" and refused == [UNFUSED]:
        pytest.skip(UNFUSED)
    assert refused == []
    got = observed(Sdpa(), inputs, learned, None)
    if case.bias == "dense":
        got.pop(f"gradient {len(learned) - 1}")
    assert_conforms(case, got, None)


@pytest.mark.parametrize("case", chosen(SQUARE), ids=str)
def test_sdpa_refuses_what_it_cannot_do(case: Case) -> None:
    inputs, _ = case.build()
    refused = Sdpa().refuses(inputs, statistics=False)
    beyond = (
        case.score in ("additive", "distance", "distance_plain")
        or case.bias != "none"
        or case.extra not in ("plain", "dropout")
        or (case.extra == "dropout" and cases.DEVICE == "cpu")
    )
    # Its CUDA kernels do not take every type and mask.
    assert bool(refused) == beyond or (cases.DEVICE == "cuda" and refused == [UNFUSED])


@pytest.mark.parametrize("mask", ["none", "causal", "documents", "longformer", "keep"])
@pytest.mark.parametrize("extra", ["plain", "all"])
def test_tiled_with_its_own_tiles(mask: str, extra: str) -> None:
    """Lengths past one tile of the sizes that are really used, none of them a multiple."""
    # On a card a tile holds more.
    keys = 1157 if cases.DEVICE == "cpu" else 4165
    sizes = Sizes(B=1, H=2, G=1, Q=150, K=keys, D=16, E=8)
    case = Case(mask, "scaled_dot", "none", extra, torch.float32, sizes)
    inputs, learned = case.build()
    assert sum(len([*slab.row_tiles()]) for slab in slabs(inputs)) > 1
    assert tiles.tile_size(inputs).keys < sizes.K
    got = observed(Tiled(), inputs, learned, TiledPass())
    assert_conforms(case, got, ReferencePass())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("queries", "score", "bias", "extra"),
    [
        (1, "scaled_dot", "none", "plain"), (3, "scaled_dot", "none", "plain"),
        (3, "scaled_dot", "dense", "all"), (1, "cosine", "none", "dropout"),
    ],
)  # fmt: skip
def test_tiled_of_a_few_queries(mask: str, queries: int, score: str, bias: str, extra: str) -> None:
    """As when tokens are generated: all batch entries at once, and one tile of rows for all keys,
    whatever a mask leaves of it."""
    sizes = Sizes(B=2, H=4, G=2, Q=queries, K=300, D=16, E=8)
    case = Case(mask, score, bias, extra, torch.float32, sizes)
    inputs, learned = case.build()
    (slab,) = slabs(inputs)
    (tile,) = slab.row_tiles()
    assert [cut.keys for cut in tile.cuts] == [slice(0, 300)]
    got = observed(Tiled(), inputs, learned, TiledPass())
    assert_conforms(case, got, ReferencePass())
    if extra != "plain" or inputs.mask is None or inputs.mask.band() is None:
        assert Tiled().work(inputs, statistics=True).pairs == 2 * 4 * queries * 300
