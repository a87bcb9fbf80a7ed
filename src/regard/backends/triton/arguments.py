"""A checked call in the form that kernels take."""

from __future__ import annotations

import triton
from torch import Tensor

from regard.backends.triton.pairs import (
    ALIBI,
    DENSE,
    NO_BIAS,
    RELATIVE,
    Added,
    Dropping,
    Score,
    Sheet,
    Sizes,
)
from regard.biases.alibi import Alibi
from regard.biases.dense import Dense
from regard.biases.relative import Relative
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot


def sheet(t: Tensor) -> Sheet:
    """A tensor with four axes, copied only if its last one is not contiguous."""
    t = t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()
    return Sheet(t, t.stride(0), t.stride(1), t.stride(2))


def sizes(x: AttentionInputs) -> Sizes:
    return Sizes(x.shape.Q, x.shape.K, x.shape.H, x.group)


def wide(width: int) -> int:
    """The width of a tile that holds vectors of some width."""
    return max(16, 1 << (width - 1).bit_length())


def score(x: AttentionInputs) -> Score:
    assert isinstance(x.comparison, Dot)
    capped = x.softcap is not None
    scale, constant = float(x.comparison.scale), triton.language.constexpr
    return Score(scale, constant(scale > 0), constant(capped), x.softcap or 1.0)


def added(x: AttentionInputs) -> Added:
    match x.bias:
        case None:
            return Added(NO_BIAS, None, 0, 0, 0, 0, 0, 0)
        case Alibi(slopes, offset):
            return Added(ALIBI, slopes.contiguous(), 0, 0, 0, 0, 0, offset)
        case Relative(table, offset):
            table = table.contiguous()
            head = 0 if table.shape[0] == 1 else table.stride(0)
            return Added(RELATIVE, table, 0, head, 0, 0, table.shape[1] // 2, offset)
        case Dense(tensor):
            return Added(DENSE, tensor, *broadcast_strides(tensor), 0, 0)
    raise AssertionError(f"a bias the kernels do not know: {x.bias!r}")


def broadcast_strides(t: Tensor) -> tuple[int, int, int, int]:
    """Strides of a tensor with four axes, 0 along those that are repeated."""
    a, b, c, d = (0 if n == 1 else s for s, n in zip(t.stride(), t.shape, strict=True))
    return a, b, c, d


def dropping(x: AttentionInputs) -> Dropping:
    if not x.dropout:
        return Dropping(triton.language.constexpr(False), 0, 0, 1.0)
    assert x.seed is not None
    return Dropping(
        triton.language.constexpr(True), int(x.seed), int(x.dropout * 2**32), 1 / (1 - x.dropout)
    )


def describable(t: Tensor) -> bool:
    """Whether the copy engine can read a tensor: addresses and strides in steps of 16 bytes."""
    if t.stride(-1) != 1 or t.data_ptr() % 16:
        return False
    return all(s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
