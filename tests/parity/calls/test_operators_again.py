"""Operators called again and again, as compiled programs do, with one thing changed from call to
call: what was decided for one kind of call must not be used for another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import masks
from regard.backends.inference_operators import _taken_apart
from regard.backends.operator_kinds import in_numbers
from regard.backends.passes import taken_apart
from regard.backends.reference import Reference
from regard.inputs import AttentionInputs, check
from tests.parity import cases
from tests.parity.agreement import Plain, assert_as_exact, errors
from tests.torch_settings import deterministic, threads

TRITON = pytest.param("triton", marks=pytest.mark.interpreted)
ROWS, WIDTH = (300, 128) if cases.DEVICE == "cuda" else (24, 16)


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
    "one thread": {"within": partial(threads, 1)},
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


Run = Callable[[AttentionInputs], list[Tensor]]


def answers(x: AttentionInputs, g: Tensor | None, run: Run) -> dict[str, Tensor]:
    """What comes out, and gradients of the output where one is given."""
    q, k, v = (t.detach().requires_grad_(g is not None) for t in (x.q, x.k, x.v))
    rows = run(replace(x, q=q, k=k, v=v))
    found = dict(zip(("out", "lse", "max_logit", "entropy"), rows, strict=False))
    if g is not None:
        grads = torch.autograd.grad(rows[0], (q, k, v), g.to(rows[0].dtype))
        found |= zip(("dq", "dk", "dv"), grads, strict=True)
    return {name: t.detach().cpu() for name, t in found.items()}


def operator_of(name: str, *, statistics: bool, learned: bool) -> Run:
    def run(x: AttentionInputs) -> list[Tensor]:
        told, (q, k, v, sink, seed, *own) = taken_apart(x)
        if not learned:
            operator = getattr(torch.ops.regard, f"{name}_inference")
            out, *memory = operator(q, k, v, *told.told[:4], statistics)
            apart = [_taken_apart(table, *out.shape[:3]) for table in memory]
            return [out, *(row for (a, b, c) in apart for row in (c, a, b))]
        operator = getattr(torch.ops.regard, name)
        rows = operator(q, k, v, sink, seed, own, *told.told, statistics, False)
        return list(rows[: 4 if statistics else 1])

    return run


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "inference"])
@pytest.mark.parametrize("statistics", [True, False], ids=["statistics", "output"])
@pytest.mark.parametrize("name", ["tiled", TRITON])
def test_one_thing_changes_from_call_to_call(name: str, statistics: bool, learned: bool) -> None:
    if name == "triton" and not statistics and cases.DEVICE == "cpu":
        pytest.skip("interpreted, kernels are not replayed: one way of them is enough")
    if name == "triton":
        import regard.backends.triton.operators  # noqa: F401 - registers it
    run = operator_of(name, statistics=statistics, learned=learned)

    def reference(x: AttentionInputs) -> list[Tensor]:
        return list(Reference().observe(x))[: 4 if statistics else 1]

    for seed, (what, change) in enumerate(CALLS.items()):
        told = {**SIZES, "mask": masks.causal(), **change}
        within = told.pop("within", nullcontext)
        x = call(seed, **told)
        if not learned and not in_numbers(x):
            continue
        g = None
        if learned:
            source = torch.Generator().manual_seed(seed)
            g = torch.randn(*x.q.shape, generator=source).to(x.q)
        with within():
            got = answers(x, g, run)
        q, k, v = (t.double() for t in (x.q, x.k, x.v))
        truth = answers(replace(x, q=q, k=k, v=v), g, reference)
        plain = answers(Plain(**vars(x)), g, reference)
        try:
            assert_as_exact(got, truth, [errors(plain, truth)])
        except AssertionError as wrong:
            wrong.add_note(f"of the call: {what}")
            raise
