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


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 60.0])
def test_units_of_every_size_are_as_exact_as_tanh(size):
    """Sizes at which exponentials are multiplied, at which they would cancel, and overflow."""
    source = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 70, 8, generator=source).double() for _ in range(2)]
    # Opposite units, whose sum is small where both are large.
    q, k = size * x[0], (x[1] / 2 - size * x[0].flip(1))
    w = torch.randn(8, generator=source).double()

    def run(dtype, plain=False):
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, w)]
        if plain:
            s = (inputs[0][:, :, None] + inputs[1][:, None]).tanh() @ inputs[2]
            out, lse = s.softmax(-1) @ inputs[1], s.logsumexp(-1)
        else:
            one = torch.eye(8, dtype=dtype)
            score = regard.scores.additive(one, one, inputs[2])
            t = regard.trace(inputs[0], inputs[1], inputs[1], score=score)
            out, lse = t.out, t.lse
        grads = torch.autograd.grad(out.sum() + lse.square().sum(), inputs)
        return [out.detach(), lse.detach(), *grads]

    right = run(torch.float64, plain=True)
    for ours, plain, truth in zip(
        run(torch.float32), run(torch.float32, plain=True), right, strict=True
    ):
        allowed = 4 * (plain - truth).norm() + 1e-6 * truth.norm()
        assert (ours - truth).norm() <= allowed
    assert_close(run(torch.float64), right)
