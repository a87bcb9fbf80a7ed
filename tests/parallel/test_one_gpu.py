"""Two ranks with tensors on one GPU, through gloo: their answers are those of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import regard
from regard import masks, parallel
from tests.parallel.processes import Case, run

METHODS = ("ulysses", "all_gather", "ring")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_every_method_on_one_gpu() -> None:
    found = run(_cases, 2)
    assert found == {method: [None, None] for method in METHODS}


def _cases() -> dict[str, Case]:
    return {method: partial(_as_one_process, method) for method in METHODS}


def _as_one_process(method: str) -> None:
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, h, 90, 32, generator=draw).cuda().requires_grad_() for h in (4, 2, 2)]
    layout = parallel.zigzag(90, 2)
    mine = [layout.shard(t.detach(), dim=2).requires_grad_() for t in whole]
    want = regard.trace(*whole, mask=masks.causal())
    got = parallel.trace(*mine, mask=masks.causal(), layout=layout, method=method)
    pairs = [(got.out, want.out), (got.lse, want.lse), (got.received(), want.received())]
    pairs += zip(
        torch.autograd.grad(got.out.square().sum(), mine),
        torch.autograd.grad(want.out.square().sum(), whole),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, layout.shard(theirs, dim=2), rtol=1e-4, atol=1e-5)
