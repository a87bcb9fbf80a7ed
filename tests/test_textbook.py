"""Examples that textbooks work out on paper."""

from __future__ import annotations

import math

import pytest
import torch

import regard
from regard import masks, scores


def test_three_keys_on_paper():
    q = torch.tensor([[1.0, 0, 1, 0]])
    k = torch.tensor([[1.0, 0, 0, 1], [0, 1, 1, 0], [1, 0, 1, 0]])
    v = torch.eye(3)
    seen = regard.trace(q, k, v)
    weights = seen.weights()
    logits = weights.log() + seen.lse[:, None]
    torch.testing.assert_close(logits, torch.tensor([[0.5, 0.5, 1.0]]))
    total = 2 * math.exp(0.5) + math.exp(1)
    exact = torch.tensor([[math.exp(0.5), math.exp(0.5), math.exp(1)]]) / total
    torch.testing.assert_close(weights, exact)
    assert [round(w, 2) for w in weights[0].tolist()] == [0.27, 0.27, 0.45]
    torch.testing.assert_close(seen.out, exact)
    assert seen.max_logit.item() == pytest.approx(1.0)
    assert seen.entropy.item() == pytest.approx(-(exact * exact.log()).sum().item())


def test_six_by_six_causal():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8, generator=draw) for _ in range(3))
    weights = regard.trace(q, k, v, mask=masks.causal()).weights()
    for i in range(6):
        assert (weights[:, :, i, i + 1 :] == 0).all()
        assert (weights[:, :, i, : i + 1] > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 6))
    # exp(logit - lse), each of which was rounded.
    torch.testing.assert_close(weights[:, :, 0, 0], torch.ones(1, 2))


def test_without_looking_every_key_weighs_the_same():
    x = torch.zeros(6, 4)
    seen = regard.trace(x, x, x, mask=masks.causal())
    for i in range(6):
        torch.testing.assert_close(seen.weights()[i, : i + 1], torch.full((i + 1,), 1 / (i + 1)))
        assert seen.entropy[i].item() == pytest.approx(math.log(i + 1), abs=1e-6)


@pytest.mark.parametrize("d", [4, 64, 256])
def test_why_the_square_root(d):
    """Entries of variance 1: q·k has variance d, q·k/√d has 1, q·k/d has 1/d."""
    n = 4000
    draw = torch.Generator().manual_seed(d)
    q, k = (torch.randn(n, 1, d, generator=draw, dtype=torch.float64) for _ in range(2))
    # The variance of n samples strays by √((kurtosis - 1) / n) of itself; q·k has 3 + 6/d.
    tolerance = 5 * math.sqrt((2 + 6 / d) / n)

    def variance(**how) -> float:
        # With one key, log-sum-exp is its logit.
        return regard.trace(q, k, k, backend="reference", **how).lse.var().item()

    assert variance(score=scores.dot()) == pytest.approx(d, rel=tolerance)
    assert variance() == pytest.approx(1, rel=tolerance)
    assert variance(scale=1 / d) == pytest.approx(1 / d, rel=tolerance)
