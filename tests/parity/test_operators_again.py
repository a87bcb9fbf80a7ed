"""Operators called again and again, as compiled programs do, with one thing changed from call to
call: what was decided for one kind of call must not be used for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import masks
from regard.backends.passes import taken_apart
from regard.backends.reference import Reference
from regard.inputs import AttentionInputs, check
from tests.parity import cases
from tests.parity.agreement import Plain, assert_as_exact, errors

pytestmark = pytest.mark.interpreted
ROWS, WIDTH = (300, 128) if cases.DEVICE == "cuda" else (24, 16)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def crosswise(t: Tensor) -> Tensor:
    """The same numbers, as a projection of all heads has them."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def aside(t: Tensor) -> Tensor:
    """The same numbers, not at a multiple of 16 bytes."""
    memory = t.new_zeros(t.numel() + 1)[1:]
    return memory.copy_(t.flatten()).view(t.shape)


def same(t: Tensor) -> Tensor:
    return t


SIZES = {"rows": ROWS, "keys": ROWS, "heads": 2, "batch": 2, "dtype": torch.bfloat16}
CALLS: dict[str, dict[str, Any]] = {
    "the first": {},
    "once more": {},
    "other rows": {"rows": ROWS - 3},
    "other keys": {"keys": ROWS + 5},
    "a head for each": {"heads": 4},
    "one text": {"batch": 1},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "heads inside": {"laid": crosswise},
    "aside": {"laid": aside},
    "all seen": {"mask": None},
    "a window": {"mask": masks.causal() & masks.window(9)},
    "a longer window": {"mask": masks.causal() & masks.window(11)},
    "first keys": {"mask": masks.prefix(7)},
    "more first keys": {"mask": masks.prefix(9)},
    "gaps": {"mask": masks.causal() & masks.dilated(3)},
    "a scale": {"scale": 0.3},
    "soft-capped": {"softcap": 2.0},
    "soft-capped at less": {"softcap": 1.0},
    "in a fixed order": {"within": deterministic},
    "under autocast": {"within": lambda: torch.autocast(cases.DEVICE, torch.bfloat16)},
    "the first again": {},
}


def call(
    seed: int,
    rows: int,
    keys: int,
    heads: int,
    batch: int,
    dtype: torch.dtype,
    mask: masks.Mask | None,
    laid: Callable[[Tensor], Tensor] = same,
    scale: float | None = None,
    softcap: float | None = None,
) -> AttentionInputs:
    source = torch.Generator().manual_seed(seed)
    shapes = ((4, rows), (heads, keys), (heads, keys))
    q, k, v = (
        laid(torch.randn(batch, h, n, WIDTH, generator=source).to(cases.DEVICE, dtype))
        for h, n in shapes
    )
    return check(
        q, k, v, mask=mask, score=None, bias=None, softcap=softcap, sink=None, scale=scale,
        dropout=0.0, training=False,
    )  # fmt: skip


def answers(
    x: AttentionInputs, g: Tensor, run: Callable[[AttentionInputs], tuple[Tensor, ...]]
) -> dict[str, Tensor]:
    """What comes out, and gradients of one output."""
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    out, *statistics = run(replace(x, q=q, k=k, v=v))
    grads = torch.autograd.grad(out, (q, k, v), g.to(out.dtype))
    names = ("out", "lse", "max_logit", "entropy")
    found = dict(zip(names, (out, *statistics), strict=False))
    found.update(zip(("dq", "dk", "dv"), grads, strict=True))
    return {name: t.detach().cpu() for name, t in found.items()}


@pytest.mark.parametrize("statistics", [True, False])
def test_one_thing_changes_from_call_to_call(statistics: bool) -> None:
    import regard.backends.triton.operators  # noqa: F401 - registers it

    def operator(x: AttentionInputs) -> tuple[Tensor, ...]:
        told, (q, k, v, sink, seed, *own) = taken_apart(x)
        rows = torch.ops.regard.triton(q, k, v, sink, seed, own, *told.told, statistics, False)
        return rows[:4] if statistics else rows[:2]

    def reference(x: AttentionInputs) -> tuple[Tensor, ...]:
        return tuple(Reference().observe(x))[: 4 if statistics else 2]

    for seed, (name, change) in enumerate(CALLS.items()):
        told = {**SIZES, "mask": masks.causal(), **change}
        within = told.pop("within", nullcontext)
        x = call(seed, **told)
        g = torch.randn(*x.q.shape, generator=torch.Generator().manual_seed(seed)).to(cases.DEVICE)
        g = g.to(x.q.dtype)
        with within():
            got = answers(x, g, operator)
        q, k, v = (t.double() for t in (x.q, x.k, x.v))
        truth = answers(replace(x, q=q, k=k, v=v), g, reference)
        plain = answers(Plain(**vars(x)), g, reference)
        try:
            assert_as_exact(got, truth, [errors(plain, truth)])
        except AssertionError as wrong:
            wrong.add_note(f"of the call: {name}")
            raise
