import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import regard
from regard import linear, masks, nn


def naive(q, k, v, feature, lengths=None, causal=False):
    """The formula with its n×n matrix."""
    weights = feature(q) @ feature(k).mT
    n, m = weights.shape[-2:]
    if causal:
        weights = weights * torch.ones(n, m).tril()
    if lengths is not None:
        weights = weights * (torch.arange(m) < lengths[:, None, None, None])
    total = weights.sum(-1, keepdim=True)
    return weights @ v / torch.where(total == 0, 1, total)


def draw(n, m=None, width=5, value=3):
    m = n if m is None else m
    return [
        torch.randn(2, 3, n, d).double().requires_grad_() for n, d in ((n, width), (m, width))
    ] + [torch.randn(2, 3, m, value).double().requires_grad_()]


@pytest.mark.parametrize("feature", [nn.elu_plus_one, torch.relu])
@pytest.mark.parametrize(("n", "chunk"), [(1, 4), (7, 4), (63, 16), (64, 16), (111, 32), (9, 100)])
def test_causal_chunks_equal_the_naive_formula(n, chunk, feature):
    inputs = draw(n)
    ours = nn.linear_attention(*inputs, feature, chunk=chunk)
    right = naive(*inputs, feature, causal=True)
    assert_close(ours, right)
    weight = torch.randn_like(ours)
    ours = torch.autograd.grad((ours * weight).sum(), inputs)
    assert_close(ours, torch.autograd.grad((right * weight).sum(), inputs))


@pytest.mark.parametrize("feature", [nn.elu_plus_one, torch.relu])
def test_without_order_it_equals_the_naive_formula(feature):
    inputs = draw(6, 11)
    assert_close(nn.linear_attention(*inputs, feature), naive(*inputs, feature))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(n=st.integers(0, 40), chunk=st.integers(1, 50), data=st.data())
def test_chunks_and_padding_do_not_matter(n, chunk, data):
    lengths = torch.tensor([data.draw(st.integers(0, n)) for _ in range(2)])
    inputs = draw(n)
    ours = nn.linear_attention(*inputs, lengths=lengths, chunk=chunk)
    assert_close(ours, naive(*inputs, nn.elu_plus_one, lengths, causal=True))


def test_elu_plus_one_is_what_it_says():
    x = torch.cat([torch.randn(50).double() * 5, torch.zeros(1).double()]).requires_grad_()
    ours, theirs = nn.elu_plus_one(x), torch.nn.functional.elu(x) + 1
    assert_close(ours, theirs)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)]
    assert_close(*gradients)
    assert nn.elu_plus_one(torch.tensor([1e30, -1e30])).isfinite().all()


def test_gradients_are_right():
    inputs = draw(5, width=2, value=2)
    assert torch.autograd.gradcheck(
        lambda *t: nn.linear_attention(*t, chunk=2, lengths=torch.tensor([5, 3])), inputs
    )


def test_padding_hides_even_what_is_not_a_number():
    attention = nn.LinearAttention(12, 3)
    x = torch.randn(2, 6, 12)
    poisoned = x.clone()
    poisoned[1, 4:] = torch.nan
    mask = masks.padding([6, 4])
    assert_close(attention(poisoned, mask=mask)[1, :4], attention(x, mask=mask)[1, :4])
    assert_close(attention(x, mask=mask)[1, :4], attention(x[1:, :4])[0], atol=1e-6, rtol=1e-5)


def test_a_query_that_meets_nothing_gives_zero():
    q, k, v = (t.requires_grad_() for t in (-torch.ones(1, 1, 3, 2), *torch.ones(2, 1, 1, 3, 2)))
    out = nn.linear_attention(q, k, v, torch.relu)
    assert (out == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [q, k, v]))


def test_the_module_is_causal_when_asked():
    attention = nn.LinearAttention(12, 3, chunk=4).double()
    x = torch.randn(2, 11, 12).double()
    whole = attention(x, mask=masks.causal())
    assert_close(attention(x[:, :6], mask=masks.causal()), whole[:, :6])
    assert not torch.allclose(attention(x), whole)
    memory = torch.randn(2, 5, 12).double()
    assert attention(x, memory, mask=masks.padding([5, 2])).shape == (2, 11, 12)


def test_half_precision_sums_in_float32():
    q, k, v = torch.randn(3, 1, 1, 3000, 8).bfloat16()
    out = nn.linear_attention(q, k, v, chunk=64)
    right = nn.linear_attention(*(t.double() for t in (q, k, v)), chunk=64)
    assert out.dtype == torch.bfloat16
    assert_close(out, right.bfloat16(), atol=1e-3, rtol=2e-2)


@pytest.mark.parametrize(
    ("mask", "memory", "text"),
    [
        (
            masks.prefix(1),
            None,
            "linear attention cannot leave out these pairs\n"
            "  got:      prefix(1)\n"
            "  accepted: causal(), window(left), padding(lengths), documents(ids), or several "
            "joined by &\n"
            "  do:       use regard.attention or nn.MultiHeadAttention for other masks",
        ),
        (
            masks.causal(),
            torch.zeros(1, 3, 8),
            "linear attention is causal over one sequence only\n"
            "  got:      causal() with 2 queries and 3 keys\n"
            "  accepted: causal() in self-attention",
        ),
    ],
)
def test_refuses_masks_it_cannot_honour(mask, memory, text):
    with pytest.raises(regard.RegardError) as error:
        nn.LinearAttention(8, 2)(torch.zeros(1, 2, 8), memory, mask=mask)
    assert str(error.value) == text


def test_the_module_gives_a_trace_and_goes_on_from_a_state():
    attention = nn.LinearAttention(12, 3).double()
    x = torch.randn(2, 11, 12).double()
    whole, seen = attention(x, mask=masks.causal(), trace=True)
    assert_close(whole, attention(x, mask=masks.causal()))
    mixed = (seen.weights() @ seen.inputs.v).transpose(1, 2).flatten(2)
    assert_close(attention.out_proj(mixed), whole)
    state = linear.State()
    steps = [attention(step, state=state) for step in x.split(1, 1)]
    assert_close(torch.cat(steps, 1), whole)
    with pytest.raises(regard.RegardError, match="a trace knows the keys of its own call only"):
        attention(x, state=state, trace=True)


def test_refuses_heads_and_chunks_that_do_not_fit():
    with pytest.raises(regard.RegardError, match="heads share d_model evenly"):
        nn.LinearAttention(10, 3)
    with pytest.raises(regard.RegardError, match="chunk counts keys"):
        nn.LinearAttention(9, 3, chunk=0)


def test_refuses_what_is_no_chunk_or_no_batch_of_sequences(monkeypatch):
    # Wrong types and axes reach regard's own checks even when the shape-checking hook is on.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(regard.RegardError, match="chunk must be a whole number"):
        nn.LinearAttention(9, 3, chunk=1.5)
    attention = nn.LinearAttention(9, 3)
    for wrong in (torch.randn(4, 9), torch.randn(1, 4, 8)):
        with pytest.raises(regard.RegardError, match=r"(?s)sequences of vectors.*length, 9\]"):
            attention(wrong)
    with pytest.raises(regard.RegardError, match=r"\[1, 4, 9\] and \[1, 5, 8\]"):
        attention(torch.randn(1, 4, 9), torch.randn(1, 5, 8))


@pytest.mark.compiled
def test_compiles_as_one_graph():
    attention = nn.LinearAttention(12, 3, chunk=4)
    x, mask = torch.randn(2, 11, 12), masks.causal() & masks.padding(torch.tensor([11, 7]))
    run = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert_close(run(x, mask=mask), attention(x, mask=mask))
    run(x, mask=mask).sum().backward()
    assert attention.q_proj.weight.grad.isfinite().all()
