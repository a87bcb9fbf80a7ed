"""Which tokens each rank has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import RegardError, masks, parallel

KINDS = st.sampled_from(["contiguous", "zigzag", "by_document"])
DOCUMENTS, RANKS = st.lists(st.integers(0, 20), max_size=6), st.integers(1, 9)


def made(kind: str, documents: list[int], ranks: int) -> parallel.Layout:
    if kind == "by_document":
        return parallel.by_document(documents, ranks)
    return getattr(parallel, kind)(sum(documents), ranks)


@given(KINDS, DOCUMENTS, RANKS)
def test_every_token_has_one_rank_and_ranks_hold_theirs_in_order(
    kind: str, documents: list[int], ranks: int
) -> None:
    layout = made(kind, documents, ranks)
    each = [layout.positions(rank) for rank in range(layout.ranks)]
    assert torch.equal(torch.cat(each).sort().values, torch.arange(layout.length))
    assert all((p.diff() > 0).all() for p in each)
    assert tuple(map(len, each)) == layout.lengths


@given(KINDS, DOCUMENTS, RANKS)
def test_shards_make_up_the_whole_again(kind: str, documents: list[int], ranks: int) -> None:
    layout = made(kind, documents, ranks)
    x = torch.randn(2, layout.length, 3)
    shards = [layout.filled(layout.shard(x, 1, rank), 1) for rank in range(layout.ranks)]
    assert torch.equal(layout.in_order(torch.cat(shards, 1), 1), x)
    again = layout.in_shards(x, 1).unflatten(1, (layout.ranks, layout.longest))
    for rank, n in enumerate(layout.lengths):
        assert torch.equal(again[:, rank, :n], layout.shard(x, 1, rank))


@pytest.mark.parametrize(
    ("layout", "mask"),
    [
        (parallel.zigzag(256, 4), masks.causal()),
        (
            parallel.by_document([64, 128, 64], 4),
            masks.causal() & masks.documents([0] * 64 + [1] * 128 + [2] * 64),
        ),
    ],
)
def test_work_is_even(layout: parallel.Layout, mask: masks.Mask) -> None:
    table = mask.dense(256)[0, 0]
    pairs = [int(table[layout.positions(rank)].sum()) for rank in range(4)]
    assert max(pairs) == min(pairs)


def test_what_is_no_layout_is_refused() -> None:
    with pytest.raises(RegardError, match="cuts tokens for ranks"):
        parallel.zigzag(8, 0)
    with pytest.raises(RegardError, match="layout of 8 tokens"):
        parallel.zigzag(8, 2).shard(torch.zeros(9), 0, 1)
    with pytest.raises(RegardError, match="there is only this one"):
        parallel.attention(*torch.randn(3, 1, 2, 4, 4))


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ((((2, 5), (0, 2)), ((5, 6),)), "rank 0 holds its tokens in the order"),
        ((((0, 3),), ((5, 3), (5, 6))), "rank 1 holds its tokens in the order"),
        ((((0, 3),), ((2, 6),)), "each once"),
        ((((0, 3),), ((4, 6),)), "each once"),
        ((((1, 3),), ((3, 6),)), "each once"),
        ((((-2, 3),), ((3, 6),)), "in the order"),
    ],
)
def test_runs_of_ones_own_are_held_to_what_a_layout_is(
    runs: tuple[tuple[tuple[int, int], ...], ...], text: str
) -> None:
    """Ranks number their tokens by them: answers would be those of other tokens."""
    with pytest.raises(RegardError, match=text):
        parallel.Layout(runs, "mine")


def test_a_layout_of_ones_own() -> None:
    mine = parallel.Layout((((0, 2), (2, 2), (6, 8)), (), ((2, 6),)), "mine")
    assert mine.positions(0).tolist() == [0, 1, 6, 7]
    assert (mine.length, mine.lengths) == (8, (4, 0, 4))
