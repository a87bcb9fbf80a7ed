"""The compiled loop of additive attention against tanh in float64."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import masks, scores
from regard.backends.tiled.loop import inner_loop, trust_units
from regard.backends.tiled.units import FAR, NEAR, PLAIN, PairUnits
from tests.parity.agreement import assert_close


@pytest.fixture
def loop() -> object:
    found, why = inner_loop.found()
    if found is None:
        pytest.skip(f"no compiled loop here: {why}")
    assert found.compares_units
    return found


@pytest.mark.parametrize(
    ("size", "mode"), [(1e-4, NEAR), (0.2, NEAR), (2.0, PLAIN), (8.0, PLAIN), (90.0, FAR)]
)
@pytest.mark.parametrize("shared", [True, False])
def test_is_tanh_forward_and_backward(loop, size: float, mode: int, shared: bool) -> None:
    """As near as plain float32 comes; keys and units that fill no vector, heads that share keys."""
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    drawn = size * draw(2, 2, 2, 9, 6), size * draw(2, 2, 37, 6), draw(6) if shared else draw(4, 6)
    g, rows, keys = draw(2, 2, 2, 5, 20), slice(3, 8), slice(11, 31)
    single = [t.float() for t in drawn]
    units = PairUnits(loop, *single)
    assert units.mode == mode
    ours = units.logits(rows, keys), *_flat(units.pull_back(rows, keys, g.float()))
    found = []
    for tensors in (single, [t.double() for t in single]):
        q, k, w = (t.requires_grad_() for t in tensors)
        weight = w if shared else w.view(1, 2, 2, 1, 1, 6)
        part = q[:, :, :, rows, None], k[:, :, None, None, keys]
        s = ((part[0] + part[1]).tanh() * weight).sum(-1)
        dq, dk, dw = torch.autograd.grad(s, (q, k, w), g.float().to(s.dtype))
        found.append((s.detach(), dq[:, :, :, rows], dk[:, :, keys], dw))
    for name, got, plain, truth in zip(("logits", "q", "k", "w"), ours, *found, strict=True):
        assert_close(name, got, plain, truth)


def _flat(given):
    return given.q, given.k, *given.own


def test_threads_and_masked_numbers_change_nothing(loop) -> None:
    q, k, v = torch.randn(3, 2, 2, 150, 7, generator=torch.Generator().manual_seed(0))
    one, mask = torch.eye(7), masks.causal() & masks.padding([150, 90])
    score, found = scores.additive(one, one, torch.ones(7)), []
    for threads, poison in ((1, 0.0), (2, 0.0), (2, torch.nan)):
        k[1, :, 90:] = v[1, :, 90:] = poison
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        torch.set_num_threads(threads)
        try:
            out = regard.attention(*inputs, mask=mask, score=score, backend="tiled")
            found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        finally:
            torch.set_num_threads(1)
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_a_wrong_loop_is_not_trusted(loop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(trust_units.compares(loop, mode) for mode in trust_units.MODES)
    monkeypatch.setattr(loop, "pull_units", lambda call, threads: None)
    assert not trust_units.compares(loop, 1)
    monkeypatch.setattr(loop, "compares_units", False)
    q = torch.randn(1, 1, 20, 4)
    score = scores.additive(torch.eye(4), torch.eye(4), torch.ones(4))
    assert regard.attention(q, q, q, score=score, backend="tiled").isfinite().all()
