"""A watched model that gives a CausalBias: a tensor whose numbers mean nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import regard


class Decoder(nn.Module):
    """Queries that come after, or before, the first keys."""

    def __init__(self, bias: Callable[[int, int], Tensor]) -> None:
        super().__init__()
        self.project, self.bias = nn.Linear(8, 8), bias

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        bias = self.bias(q.shape[-2], k.shape[-2])
        return F.scaled_dot_product_attention(self.project(q), k, k, attn_mask=bias)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize(
    ("bias", "diagonal"), [(causal_upper_left, 0), (causal_lower_right, 2)], ids=["upper", "lower"]
)
def test_a_causal_bias_is_the_causal_mask(
    bias: Callable[[int, int], Tensor], diagonal: int, grad: bool
) -> None:
    torch.manual_seed(0)
    model, q, k = Decoder(bias), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    with torch.set_grad_enabled(grad):
        before = model(q, k)
        with regard.watch(model, keep="traces") as seen:
            out = model(q, k)
    torch.testing.assert_close(out, before)
    scores = model.project(q) @ k.mT / 8**0.5
    hidden = ~torch.ones(3, 5).bool().tril(diagonal)
    want = scores.masked_fill(hidden, -torch.inf).softmax(-1).detach()
    torch.testing.assert_close(seen[""].trace.weights(), want)


class Both(nn.Module):
    """A mask beside is_causal, which PyTorch's fused kernel on a CPU takes: both count."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, mask, is_causal=True)


def test_a_mask_beside_is_causal_hides_what_either_hides() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(1, 2, 4, 8), torch.rand(4, 4) > 0.4
    mask[:, 0] = True
    model, visible = Both(), mask & torch.ones(4, 4).bool().tril()
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        out = model(x, mask)
    want = (x @ x.mT / 8**0.5).masked_fill(~visible, -torch.inf).softmax(-1)
    torch.testing.assert_close(seen[""].trace.weights(), want)
    torch.testing.assert_close(out, want @ x)
