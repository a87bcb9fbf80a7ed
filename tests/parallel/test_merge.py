"""What rows saw of some keys each makes up what they saw of all."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import regard
from regard import parallel
from regard.backends.contract import Rows

NEAR = {"rtol": 1e-12, "atol": 1e-12}


def rows_of(cuts: list[int], size: float, hidden: int) -> tuple[list[Rows], Rows]:
    """Rows over runs of keys, and over all of them; the first rows do not see the first keys, and
    the very first sees none."""
    draw = torch.Generator().manual_seed(sum(cuts))
    q, k, v = torch.randn(3, 1, 2, 12, 4, generator=draw, dtype=torch.float64)
    seen = torch.arange(12) >= hidden - torch.arange(12)[:, None]
    seen[0] = False
    edges = sorted({0, 12, *cuts})
    parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
    found = [
        regard.trace(
            size * q, k[:, :, p], v[:, :, p], mask=regard.masks.keep(seen[None, None, :, p])
        )
        for p in parts
    ]
    whole = regard.trace(size * q, k, v, mask=regard.masks.keep(seen[None, None]))
    return [t.rows for t in found], whole.rows


@given(
    st.lists(st.integers(1, 11), max_size=4),
    st.sampled_from([1.0, 30.0]),
    st.integers(0, 9),
    st.randoms(use_true_random=False),
)
def test_parts_merge_in_any_order(cuts: list[int], size: float, hidden: int, chance) -> None:  # type: ignore[no-untyped-def]
    parts, whole = rows_of(cuts, size, hidden)
    chance.shuffle(parts)
    while len(parts) > 1:
        i = chance.randrange(len(parts) - 1)
        parts[i : i + 2] = [parallel.merge(*parts[i : i + 2])]
    for found, wanted in zip(parallel.merge(*parts), whole, strict=True):
        assert_close(found, wanted, **NEAR)


def test_merging_learns() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
    q.requires_grad_()
    mask = regard.masks.causal(offset=0)
    rest = regard.masks.causal(offset=-3)
    parts = [
        regard.trace(q, k[:, :, :3], v[:, :, :3], mask=mask).rows,
        regard.trace(q, k[:, :, 3:], v[:, :, 3:], mask=rest).rows,
    ]
    merged, whole = parallel.merge(*parts), regard.trace(q, k, v, mask=mask).rows
    for a, b in zip(merged, whole, strict=True):
        if b.requires_grad:
            (one,) = torch.autograd.grad(a.sin().sum(), q, retain_graph=True)
            (other,) = torch.autograd.grad(b.sin().sum(), q, retain_graph=True)
            assert_close(one, other, **NEAR)
