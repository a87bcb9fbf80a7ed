"""Tiles and counts against the dense form, and without it where it could never be built."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regard
from regard import RegardError, masks
from regard.masks.tiles import EMPTY, FULL, PARTIAL, grid, seen_keys, survey
from regard.values import Shape

CPU = torch.device("cpu")
SIZES = [(1, 1), (9, 9), (13, 13), (5, 11), (1, 8)]
TILES = [1, 2, 3, 4, 16]


def many(Q: int, K: int) -> dict[str, masks.Mask]:
    """Every mask, and combinations of all sorts, for Q <= K."""
    draw = torch.Generator().manual_seed(Q + 100 * K)

    def coins(*axes: int) -> Tensor:
        return torch.rand(axes, generator=draw) < 0.5

    ids = torch.randint(0, 3, (2, K), generator=draw)
    packed = ids[0].sort().values
    local = masks.window(2, 1)
    causal = masks.causal()
    return {
        "causal": causal,
        "causal-start": masks.causal(offset=0),
        "window": local,
        "window-open": masks.window(None, None),
        "padding": masks.padding([K, K // 2, 0]),
        "prefix": masks.prefix(3),
        "documents": masks.documents(packed),
        "documents-mixed": masks.documents(ids),
        "global": masks.global_tokens([0, 4]),
        "dilated": masks.dilated(3),
        "blocks": masks.blocks(coins(2, 3, -(-Q // 3), -(-K // 3)), 3),
        "blocks-of-tiles": masks.blocks(coins(-(-Q // 4), -(-K // 4)), 4),
        "keep": masks.keep(coins(2, 1, Q, K)),
        "ignore": masks.ignore(coins(1, 3, 1, K)),
        "nothing": causal & ~causal,
        "everything": causal | ~causal,
        "band": causal & masks.window(3, 3),
        "two-bands": masks.window(1) | masks.window(0, 2),
        "outside-a-band": ~local,
        "diagonal-gap": causal & ~masks.window(1),
        "dilated-window": masks.window(4, 2) & masks.dilated(2),
        "dilated-or-near": masks.dilated(4) | local,
        "longformer": local | masks.global_tokens([0]),
        "packed": causal & masks.documents(packed),
        "padded": causal & masks.padding([K, 1]),
        "prefix-lm": causal | masks.prefix(2),
        "sinks": causal & (masks.window(2) | masks.prefix(1)),
        "not-packed": ~(causal & masks.documents(packed)) & masks.prefix(K - 1),
        "heads-and-batch": (masks.keep(coins(1, 3, Q, K)) | causal) & masks.padding([K, K // 2]),
    }


NAMES = list(many(1, 1))


def states_by_hand(dense: Tensor, size: int) -> Tensor:
    rows = [
        torch.stack(
            [
                block.all((-1, -2)).long() + block.any((-1, -2)).long()
                for block in strip.split(size, -1)
            ],
            -1,
        )
        for strip in dense.split(size, -2)
    ]
    return torch.stack(rows, -2)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_quick_judgement_is_never_wrong(name, size):
    """Without looking inside, a tile may be called partial, but full and empty are facts."""
    mask = many(*size)[name]
    dense = mask.dense(*size)
    shape = Shape(mask.batch, mask.heads, *size)
    bound = mask.bind(shape, CPU)
    for q_side, k_side in [(1, 1), (2, 5), (4, 4), (16, 3)]:
        quick = grid(bound, shape, q_side, k_side, CPU, exact=False)
        for i, strip in enumerate(dense.split(q_side, -2)):
            for j, block in enumerate(strip.split(k_side, -1)):
                state = quick[..., i, j]
                assert block.all((-1, -2))[state == FULL].all()
                assert not block.any((-1, -2))[state == EMPTY].any()
        if (q_side, k_side) == (1, 1):
            assert not (quick == PARTIAL).any()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_tiles_agree_with_dense(name, size):
    mask = many(*size)[name]
    dense = mask.dense(*size)
    for side in TILES:
        tiles = mask.tiles(*size, size=side)
        assert tiles.dtype == torch.int8
        assert torch.equal(tiles.long(), states_by_hand(dense, side))


@pytest.mark.parametrize("size", [*SIZES, (150, 300)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_count_is_the_sum_of_dense(name, size):
    mask = many(*size)[name]
    assert mask.count(*size) == int(mask.dense(*size).sum())


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("nothing", "everything")])
def test_a_survey_counts_pairs_and_the_tiles_that_hold_them(name):
    Q, K = 13, 17
    mask = many(Q, K)[name]
    shape = Shape(mask.batch, mask.heads, Q, K)
    found = survey(mask.bind(shape, CPU), shape, 2, 4, CPU)
    dense = mask.dense(Q, K)
    assert found.pairs == int(dense.sum())
    held = [
        int(block.any((-1, -2)).sum()) * block.shape[-1] * block.shape[-2]
        for strip in dense.split(2, -2)
        for block in strip.split(4, -1)
    ]
    assert found.visited == sum(held)


@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.window(2, 1),
        masks.prefix(2),
        masks.padding([0, 0]),
        masks.global_tokens([0]),
        masks.causal() & masks.window(1),
        masks.causal() | masks.prefix(1),
        ~masks.causal() & masks.global_tokens([1]),
    ],
    ids=repr,
)
def test_no_queries_or_no_keys(mask, size):
    assert mask.dense(*size).shape == (mask.batch, 1, *size)
    assert mask.count(*size) == 0
    assert mask.tiles(*size, size=2).shape == (mask.batch, 1, -(-size[0] // 2), -(-size[1] // 2))


class LargestTensor(TorchDispatchMode):
    """How many bytes the largest tensor made meanwhile takes."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [t.numel() * t.element_size() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return out


def test_the_largest_tensor_is_seen():
    with LargestTensor() as seen:
        masks.causal().dense(1000)
    assert seen.bytes >= 1000 * 1000


N = 250_000
LENGTH = 1000
PACKED = masks.documents(torch.arange(N) // LENGTH)


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (masks.causal(), N * (N + 1) // 2),
        (masks.causal() & masks.window(1023), 1023 * 1024 // 2 + (N - 1023) * 1024),
        (masks.window(4, 4) | masks.dilated(N), 9 * N - 2 * 10),
        (masks.dilated(2), N * N // 2),
        (PACKED, N * LENGTH),
        (masks.causal() & PACKED, N * (LENGTH + 1) // 2),
        (masks.causal() | masks.prefix(10), N * (N + 1) // 2 + 45),
        (masks.global_tokens([0]), 2 * N - 1),
        (masks.padding([N, 7]) & masks.causal(), N * (N + 1) // 2 + 28 + (N - 7) * 7),
    ],
    ids=["causal", "window", "dilated-or-near", "dilated", "documents", "packed", "prefix-lm",
         "global", "padded"],
)  # fmt: skip
def test_long_texts_are_counted_without_a_square(mask, pairs):
    with LargestTensor() as seen:
        assert mask.count(N) == pairs
    assert seen.bytes <= 64 * N


def test_long_texts_are_drawn_without_a_square():
    with LargestTensor() as seen:
        text = masks.causal().draw(N, width=4)
    assert text == "▒▒······\n██▒▒····\n████▒▒··\n██████▒▒"
    assert seen.bytes <= 64 * N


def test_lengths_cannot_be_negative():
    with pytest.raises(RegardError, match="negative length"):
        masks.causal().tiles(-3)


def test_a_survey_of_distances_that_are_settled_early():
    mask = masks.window(8) | masks.window(0, 8)
    x = torch.ones(1, 1, 9, 8)
    assert regard.plan(x, x, x, mask=mask).flops_needed > 0
    bound = mask.bind(Shape(1, 1, 9, 9), CPU)
    assert survey(bound, Shape(1, 1, 9, 9), 2, 2, CPU) == (81, 81)


def test_a_survey_of_an_empty_band():
    mask = masks.causal() & ~masks.causal()
    shape = Shape(1, 1, 13, 17)
    assert survey(mask.bind(shape, CPU), shape, 2, 4, CPU).visited == 0


@pytest.mark.parametrize("mask", [masks.dilated(2), masks.window(2) | masks.window(0, 3)], ids=repr)
def test_counting_nothing_at_all(mask):
    assert mask.count(0, 0) == 0


def test_no_batch_behind_a_mask_of_it():
    none, lengths = torch.ones(0, 4, 5, 8), torch.zeros(0, dtype=torch.long)
    mask = masks.causal() & masks.padding(lengths)
    assert regard.attention(none, none, none, mask=mask, backend="reference").shape == none.shape
    assert mask.dense(3).shape == (0, 1, 3, 3)


@pytest.mark.parametrize("size", [*SIZES, (150, 300)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_seen_keys_are_the_row_sums_of_dense(name, size):
    mask = many(*size)[name]
    shape = Shape(mask.batch, mask.heads, *size)
    assert torch.equal(seen_keys(mask.bind(shape, CPU), shape, CPU), mask.dense(*size).sum(-1))


@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("mask", [masks.causal(), masks.dilated(2) | masks.window(1)], ids=repr)
def test_nothing_is_seen_where_nothing_is(mask, size):
    shape = Shape(1, 1, *size)
    assert seen_keys(mask.bind(shape, CPU), shape, CPU).tolist() == [[[0] * size[0]]]


def test_masks_without_an_outline_are_counted_one_by_one() -> None:
    source = torch.Generator().manual_seed(0)
    n = 700
    for mask in (
        masks.documents(torch.randint(0, 9, (2, n), generator=source)),
        masks.keep(torch.rand(n, generator=source) < 0.5) & masks.causal(),
        masks.keep(torch.rand(2, 3, n, n, generator=source) < 0.5),
        (masks.dilated(7) | masks.window(9)) & ~masks.prefix(3),
    ):
        dense = mask.dense(n)
        assert mask.count(n) == int(dense.sum())
