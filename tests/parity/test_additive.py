"""The kernels of additive attention against the reference: interpreted on a CPU
(TRITON_INTERPRET=1), or on a GPU (--device cuda)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import regard
from regard import RegardError, biases, masks, scores
from regard.backends.reference import ReferencePass
from tests.parity import cases
from tests.parity.agreement import assert_close
from tests.parity.cases import Case, Sizes, assert_conforms, observed

pytestmark = pytest.mark.interpreted

SMALL = Sizes(B=2, H=2, G=1, Q=17, K=21, D=4, E=3)
TABLE = [
    Case("none", "additive", "none", "plain", torch.float32, replace(SMALL, B=1)),
    Case("causal", "additive", "none", "softcap", torch.bfloat16, replace(SMALL, B=1)),
    Case("causal_padding", "additive", "none", "sink", torch.float16, SMALL),
    Case("documents", "additive", "none", "dropout", torch.float32, SMALL),
    Case("where", "additive", "none", "plain", torch.bfloat16, SMALL),
    Case("nothing", "additive", "none", "all", torch.float32, replace(SMALL, B=1)),
]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that every case has several, full and partial."""
    from regard.backends.triton.additive import passes

    tile, wanted = passes.Tile(16, 16, 4), passes.tiles_for
    monkeypatch.setattr(
        passes, "tiles_for", lambda x: passes.Tiles(tile, tile, tile, wanted(x).precision)
    )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_kernels(case: Case) -> None:
    from regard.backends.triton import Triton

    inputs, learned = case.build()
    assert Triton().refuses(inputs, statistics=True) == []
    got = observed(Triton(), inputs, learned, ReferencePass())
    assert_conforms(case, got, ReferencePass())


@pytest.mark.parametrize("size", [1e-3, 0.2, 3.0, 60.0])
def test_every_size_of_units(size: float) -> None:
    """Near 0, where 1 - 2r would cancel, and where exponentials would overflow. (Five units: four
    together and one alone.)"""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 5, generator=source, dtype=torch.float64) for n in (20, 37, 37))
    q, k, w = size * q, size * k, torch.randn(5, generator=source, dtype=torch.float64) / size
    one = torch.eye(5, dtype=torch.float64)
    found = []
    plain, exact = (torch.float32, "reference"), (torch.float64, "reference")
    for dtype, backend in ((torch.float32, "triton"), plain, exact):
        inputs = [t.to(dtype).to(cases.DEVICE).requires_grad_() for t in (q, k, v, w)]
        eye = one.to(dtype).to(cases.DEVICE)
        score = scores.additive(eye, eye, inputs[3])
        out = regard.attention(*inputs[:3], score=score, backend=backend)
        grads = torch.autograd.grad(out.square().sum(), inputs)
        found.append([t.detach().cpu() for t in (out, *grads)])
    for name, *results in zip(("out", "q", "k", "v", "w"), *found, strict=True):
        assert_close(name, *results)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", ["runs", "tiles"])
def test_full_tiles_between_partial_ones(kind: str) -> None:
    """Documents of other lengths in each batch entry, and a table with whole tiles in it."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, 48, 3, generator=source) for _ in range(3))
    mask = masks.documents(torch.stack([torch.arange(48) >= 40, torch.arange(48) >= 20]).long())
    if kind == "tiles":
        table = torch.rand(2, 1, 48, 48, generator=source) > 0.5
        table[0, :, 16:32, 16:48] = table[1, :, :16, :32] = True
        mask = masks.keep(table)
    found = []
    for backend in ("triton", "reference"):
        inputs = [t.to(cases.DEVICE).requires_grad_() for t in (q, k, v)]
        one, w = torch.eye(3, device=cases.DEVICE), torch.ones(3, device=cases.DEVICE)
        score = scores.additive(one, one, w)
        out = regard.attention(*inputs, mask=mask, score=score, backend=backend)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_what_is_hidden_does_no_harm() -> None:
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, 40, 4, generator=source).to(cases.DEVICE) for _ in range(3))
    one = torch.eye(4, device=q.device)
    score = scores.additive(one, one, torch.ones(4, device=q.device))
    mask, grads = masks.causal() & masks.padding([40, 21]), []
    for poison in (0.0, torch.nan):
        for t in (k, v):
            t[1, :, 21:] = poison
        inputs = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        inputs = [t.requires_grad_() for t in inputs]
        out = regard.attention(*inputs, mask=mask, score=score, backend="triton")
        grads.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(map(torch.equal, *grads))


def test_questions_are_answered_and_what_cannot_run_is_refused() -> None:
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 8, generator=source).to(cases.DEVICE) for _ in range(3))
    one = torch.eye(8, device=q.device)
    score = scores.additive(one, one, torch.ones(8, device=q.device))
    trace = regard.trace(q, k, v, mask=masks.causal(), score=score, backend="triton")
    right = regard.trace(q, k, v, mask=masks.causal(), score=score, backend="reference")
    torch.testing.assert_close(trace.received(), right.received())
    torch.testing.assert_close(trace.top(3).values, right.top(3).values)
    assert "triton" in str(regard.plan(q, k, v, score=score, backend="triton"))
    slopes = torch.ones(2, device=q.device, requires_grad=True)
    with pytest.raises(RegardError, match="gradients of a bias beside additive"):
        regard.attention(q, k, v, score=score, bias=biases.alibi(slopes), backend="triton")
    with pytest.raises(RegardError, match="compute in float32"):
        regard.attention(*(t.double() for t in (q, k, v)), score=score, backend="triton")
