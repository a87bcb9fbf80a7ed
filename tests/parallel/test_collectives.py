"""What travels together comes apart as it was."""

from __future__ import annotations

import pytest
import torch

from regard.parallel.collectives import _apart, _together

TYPES = torch.float32, torch.bfloat16, torch.float64, torch.int64


def drawn(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-99, 99, size, generator=torch.Generator().manual_seed(len(size))).to(
        dtype
    )


@pytest.mark.parametrize("first", TYPES, ids=str)
@pytest.mark.parametrize("second", TYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (2, 0)], ids=str)
def test_tensors_of_any_types_and_heads(
    first: torch.dtype, second: torch.dtype, ranks: int, heads: tuple[int, int]
) -> None:
    sent = [
        drawn((ranks, 1, heads[0], 5, 7), first),
        drawn((ranks, 1, heads[1], 5), second),
        # Not as it lies in memory.
        drawn((5, 1, heads[0], ranks), first).movedim(-1, 0).movedim(1, -1),
    ]
    got = _apart(_together(sent), sent)
    for mine, theirs in zip(got, sent, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_heads_of_all_ranks_are_put_together_without_a_copy() -> None:
    out, lse = torch.randn(3, 1, 2, 5, 7), torch.randn(3, 1, 2, 5)
    packed = _together([out, lse])
    got, _ = _apart(packed, [out, lse])
    heads = got.movedim(0, 1).flatten(1, 2)
    assert heads.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    assert torch.equal(heads, out.movedim(0, 1).flatten(1, 2))
