"""The commonest calls, on meta tensors: what they would launch is compiled before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard import masks
from regard.backends.contract import Rows
from regard.backends.passes import Pull
from regard.backends.triton import arguments
from regard.backends.triton.backward import backward
from regard.backends.triton.forward import forward
from regard.backends.triton.launches.launched import Collected, collected
from regard.backends.triton.questions.head_sums import sums_of_heads
from regard.backends.triton.questions.key_mass import of_keys
from regard.backends.triton.questions.longest import squared_lengths
from regard.backends.triton.questions.maps import pooled_map
from regard.backends.triton.questions.received import received_by_keys
from regard.backends.triton.settings.tuning import looking_settings
from regard.inputs import AttentionInputs, check

SHORT, MIDDLE, LONG = 256, 2048, 16384
"""Sequence lengths that the tuning distinguishes."""
BATCH = 64
"""Of short sequences, enough that together they are no small call."""
Asked = Callable[[], Any]


def common_calls(
    width: int, dtype: torch.dtype, given: Sequence[masks.Mask | None], *, gradients: bool
) -> Iterator[Asked]:
    """Prefill, training and decoding with one head dimension and type."""
    for mask in given:
        for n in (SHORT, MIDDLE, LONG):
            yield from attended(call(dtype, width, n, mask=mask))
        yield from attended(call(dtype, width, SHORT, mask=mask, batch=BATCH))
        yield from looked_at(call(dtype, width, MIDDLE, mask=mask))
        if gradients:
            for groups in (16, 2):
                yield partial(learn, call(dtype, width, MIDDLE, mask=mask, groups=groups))
                # Of short texts cuDNN computes the output, where no statistics are wanted.
                short = call(dtype, width, MIDDLE // 2, mask=mask, groups=groups, batch=8)
                yield partial(learn, short, statistics=False)
    # One query of a decoder against its KV cache: multi-head, and grouped-query attention.
    for groups in (16, 4, 2):
        for keys in (128, 4096, LONG):
            yield from attended(call(dtype, width, 1, keys=keys, groups=groups))


def attended(x: AttentionInputs) -> Iterator[Asked]:
    """A call with row statistics, and without."""
    yield partial(forward, x, statistics=True)
    yield partial(forward, x, statistics=False)


def looked_at(x: AttentionInputs) -> Iterator[Asked]:
    """The questions that are asked of every call of a model that is watched."""
    first = torch.zeros(1, dtype=torch.int64)
    how, whole = looking_settings(x), ((0, x.shape.Q), (0, x.shape.K))
    yield partial(squared_lengths, x)
    yield partial(received_by_keys, x, how, rows(x))
    yield partial(of_keys, x, how, rows(x), first)
    yield partial(of_keys, x, how, None, first)
    yield partial(sums_of_heads, x, Rows(torch.empty_like(x.q), rows(x), rows(x), rows(x)))
    for cells in (64, 256):
        yield partial(pooled_map, x, how, rows(x), (cells, cells), *whole, "mean")


def learn(x: AttentionInputs, *, statistics: bool = True) -> None:
    """The backward pass from a gradient of the output."""
    found, kept = forward(x, statistics=statistics)
    backward(x, found, kept, Pull(torch.empty_like(found.out), None, None), bias=False)


def call(
    dtype: torch.dtype, width: int, n: int, *, keys: int | None = None, groups: int = 16,
    mask: masks.Mask | None = None, batch: int = 1,
) -> AttentionInputs:  # fmt: skip
    def empty(heads: int, length: int) -> Tensor:
        return torch.empty(batch, heads, length, width, dtype=dtype, device="meta")

    k = empty(groups, keys or n)
    return check(
        empty(16, n), k, k, mask=mask, score=None, bias=None, softcap=None, sink=None, scale=None,
        dropout=0.0, training=False,
    )  # fmt: skip


def rows(x: AttentionInputs) -> Tensor:
    return torch.empty(x.shape[:3], device="meta")


def launches(capability: int, calls: Iterable[Asked]) -> dict[str, Collected]:
    """All that calls launch on such GPUs, each once, by what it is compiled for."""
    found: dict[str, Collected] = {}
    token = arguments.stands_for.set(capability)
    try:
        for run in calls:
            with collected() as made:
                run()
            for kernel, given, constants in made:
                found[kernel.signature_of(given, constants)] = kernel, given, constants
    finally:
        arguments.stands_for.reset(token)
    return found
