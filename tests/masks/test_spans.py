"""Runs of keys, one for each query, against every pair of the same masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import masks
from regard.masks.algebra import pairs
from regard.masks.packed import Packed
from regard.values import Shape

CPU = torch.device("cpu")


def told(mask: masks.Mask, shape: Shape) -> bool | None:
    """Whether a mask tells its runs, which then must be its pairs; None where it never does."""
    bound = mask.bind(shape, CPU)
    found = bound.spans(shape, CPU)
    if found is None:
        return None
    if not found.sure:
        return False
    k = torch.arange(shape.K)
    inside = (k >= found.first[..., None]) & (k < found.stop[..., None])
    want = pairs(bound, torch.arange(shape.Q), k)
    assert torch.equal(*torch.broadcast_tensors(inside, want))
    assert ((found.first >= 0) & (found.stop <= shape.K)).all()
    return True


IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [5, 1, 1, 1, 1, 1, 1, 3, 3]])
CAUSAL = masks.causal()
FUTURE = torch.ones(1, 1, 9, 9, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL,
        ~CAUSAL,
        masks.window(2),
        masks.documents(IDS),
        CAUSAL & masks.documents(IDS) & masks.window(2),
        CAUSAL & masks.padding([4, 9]),
        CAUSAL | masks.prefix([2, 5]),
        (CAUSAL | masks.prefix(3)) & masks.padding([7, 2]),
        ~masks.prefix(3),
        masks.keep(~FUTURE),
        masks.ignore(FUTURE | (torch.arange(9) < 2)),
        ~masks.ignore(~FUTURE),
        masks.blocks(torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]]).bool(), 3),
        masks.keep(torch.zeros(9, dtype=torch.bool)),
    ],
    ids=repr,
)
def test_runs_are_the_pairs(mask: masks.Mask) -> None:
    assert told(mask, Shape(2, 3, 9, 9))


@pytest.mark.parametrize(
    "mask",
    [
        masks.documents([0, 1, 0, 1, 1, 1, 1, 1, 1]),
        masks.window(1) | masks.prefix(2),
        ~masks.window(1),
        masks.keep(torch.arange(9) % 2 == 0),
    ],
    ids=repr,
)
def test_gaps_are_noticed(mask: masks.Mask) -> None:
    assert told(mask, Shape(1, 1, 9, 9)) is False


def test_masks_of_single_keys_tell_none() -> None:
    assert told(masks.dilated(2), Shape(1, 1, 9, 9)) is None
    assert told(masks.window(1) | masks.global_tokens([0]), Shape(1, 1, 9, 9)) is None


@pytest.mark.parametrize(("Q", "K"), [(5, 9), (9, 5), (1, 9), (0, 4), (3, 0)])
def test_other_lengths(Q: int, K: int) -> None:
    shape = Shape(1, 2, Q, K)
    assert told(CAUSAL, shape)
    assert told(CAUSAL | masks.prefix(2), shape)
    if Q <= K:
        assert told(CAUSAL & masks.documents(torch.arange(K) // 3), shape)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5),
    prefix=st.integers(0, 6),
    masked=st.booleans(),
)
def test_packed_sequences(lengths: list[tuple[int, int]], prefix: int, masked: bool) -> None:
    queries, keys = (torch.tensor(part) for part in zip(*lengths, strict=True))
    mask = (CAUSAL | masks.prefix(prefix)) if masked else None
    shape = Shape(1, 1, int(queries.sum()), int(keys.sum()))
    # Where queries stand before all keys of their sequence, nobody told their runs.
    before = masked and bool((queries > keys).any()) and bool(keys.any())
    assert told(Packed(mask, queries, keys), shape) is not before
