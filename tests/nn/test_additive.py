import pytest
import torch
from torch.testing import assert_close

import regard
from regard import masks, nn


def test_is_the_formula():
    attention = nn.AdditiveAttention(6, key_width=5, hidden=4).double()
    q, k, v = (torch.randn(2, n, d).double() for n, d in ((3, 6), (7, 5), (7, 9)))
    together = (q @ attention.Wq)[:, :, None] + (k @ attention.Wk)[:, None]
    weights = (together.tanh() @ attention.w).softmax(-1)
    y, seen = attention(q, k, v, trace=True)
    assert_close(y, weights @ v)
    assert_close(seen.weights(), weights)
    assert_close(attention(q, k, v), weights @ v)


def test_values_are_the_keys_unless_said():
    attention = nn.AdditiveAttention(6)
    q, k = torch.randn(1, 3, 6), torch.randn(1, 4, 6)
    assert_close(attention(q, k), attention(q, k, k))
    assert_close(attention(q), attention(q, q, q))


def test_learns_through_a_mask():
    attention = nn.AdditiveAttention(6, dropout=0.1)
    x = torch.randn(2, 5, 6, requires_grad=True)
    attention(x, mask=masks.causal() & masks.padding([5, 2])).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in attention.parameters())
    assert x.grad.isfinite().all()


def test_dropout_only_in_training():
    attention = nn.AdditiveAttention(6, dropout=0.5)
    x = torch.randn(1, 20, 6)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


def test_refuses_other_widths():
    with pytest.raises(regard.RegardError, match="additive: the matrices do not fit"):
        nn.AdditiveAttention(6)(torch.zeros(1, 2, 6), torch.zeros(1, 2, 5))


@pytest.mark.compiled
def test_compiles_as_one_graph():
    attention = nn.AdditiveAttention(6, key_width=5)
    q, k = torch.randn(2, 3, 6), torch.randn(2, 7, 5)
    run = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert_close(run(q, k), attention(q, k))
    run(q, k).sum().backward()
    assert attention.w.grad.isfinite().all()
