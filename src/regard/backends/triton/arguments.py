"""A checked call in the form that kernels take."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from regard.backends.triton.pairs import (
    ALIBI,
    DENSE,
    INTERPRETED,
    NO_BIAS,
    RELATIVE,
    Added,
    Dropping,
    Score,
    Seed,
    Sheet,
    Sizes,
)
from regard.biases.alibi import Alibi
from regard.biases.dense import Dense
from regard.biases.relative import Relative
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot


def sheet(t: Tensor) -> Sheet:
    """A tensor with four axes, copied only if its last axis is not contiguous."""
    t = t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()
    return Sheet(t, t.stride(0), t.stride(1), t.stride(2))


def sizes(x: AttentionInputs) -> Sizes:
    _, H, Q, K = x.shape
    return Sizes(Q, K, H, x.group)


def heads_as_rows(x: AttentionInputs) -> Tensor:
    """Queries [B, G, H / G, D] of a call with one query a head: the heads of a group as rows."""
    B, _, _, D = x.q.shape
    return x.q.squeeze(2).view(B, x.k.shape[1], x.group, D)


def wide(width: int) -> int:
    """The head dimension padded to what a tile holds."""
    return max(16, 1 << (width - 1).bit_length())


def tiles_of(length: int, size: int) -> int:
    """How many tiles of a size a length takes. (Triton's own function takes 20 µs.)"""
    return -(-length // size)


def constants_of(x: AttentionInputs, rows: int, keys: int, precision: str) -> dict[str, Any]:
    """What every kernel that loops over q and k is compiled for."""
    D = x.q.shape[-1]
    return {"D": D, "BD": wide(D), "BM": rows, "BN": keys, "PRECISION": precision}


_YES, _NO = triton.language.constexpr(True), triton.language.constexpr(False)


def score(x: AttentionInputs) -> Score:
    assert isinstance(x.comparison, Dot)
    scale = float(x.comparison.scale)
    capped = _NO if x.softcap is None else _YES
    return Score(scale, _YES if scale > 0 else _NO, capped, x.softcap or 1.0)


_NOTHING = Added(NO_BIAS, None, 0, 0, 0, 0, 0, 0)
_ALL_KEPT = Dropping(_NO, 0, 0, 1.0)


def added(x: AttentionInputs) -> Added:
    match x.bias:
        case None:
            return _NOTHING
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
    """Strides of a tensor with four axes, 0 along those that are broadcast."""
    a, b, c, d = (0 if n == 1 else s for s, n in zip(t.stride(), t.shape, strict=True))
    return a, b, c, d


def dropping(x: AttentionInputs) -> Dropping:
    if not x.dropout:
        return _ALL_KEPT
    assert x.seed is not None
    seed = int(x.seed) if INTERPRETED.value else Seed(x.seed)
    return Dropping(_YES, seed, int(x.dropout * 2**32), 1 / (1 - x.dropout))


def describable(t: Tensor) -> bool:
    """Whether TMA can read a tensor: addresses and strides are multiples of 16 bytes."""
    batch, head, row, last = t.stride()
    step = 16 // t.element_size()
    return not (last != 1 or batch % step or head % step or row % step or t.data_ptr() % 16)


def described_by_rows(t: Tensor, rows: int, wide: int) -> Any:
    """A tensor that TMA reads, or adds to, by so many rows of a head at a time."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, rows, wide])


@cache
def capability(device: torch.device) -> int:
    """The compute capability of a GPU: 90 is Hopper's. 0 where there is none."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


stands_for: ContextVar[int] = ContextVar("stands_for", default=0)
"""While kernels are compiled for a GPU that is not there: its compute capability. Tensors on `meta`
stand for those on such a GPU."""


def generation(device: torch.device) -> int:
    """The major compute capability of a GPU: 9 is Hopper."""
    return (stands_for.get() if device.type == "meta" else capability(device)) // 10


def on_card(t: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current GPU, which need not be the one that holds the tensors."""
    if t.device.type != "cuda" or t.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(t.device)
