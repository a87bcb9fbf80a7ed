import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import regard
from regard import biases, masks, nn


def count(module):
    return sum(p.numel() for p in module.parameters())


def by_hand(attention, x, memory=None, hidden=None):
    """The formula, head by head, on n×n matrices."""
    memory = x if memory is None else memory
    w = attention.head_width
    q, k, v = attention.q_proj(x), attention.k_proj(memory), attention.v_proj(memory)
    mixed = []
    for h in range(attention.heads):
        g = h * attention.kv_heads // attention.heads
        qh, kh, vh = q[..., h * w :][..., :w], k[..., g * w :][..., :w], v[..., g * w :][..., :w]
        s = qh @ kh.mT / math.sqrt(w)
        s = s if hidden is None else s.masked_fill(hidden, -math.inf)
        mixed.append(s.softmax(-1) @ vh)
    return attention.out_proj(torch.cat(mixed, -1))


def test_parameters_of_64_wide_8_heads():
    assert count(nn.MultiHeadAttention(64, 8)) == 16_384
    assert count(nn.MultiHeadAttention(64, 8, bias=True)) == 16_384 + 4 * 64


def test_head_width_of_512_wide_8_heads():
    assert nn.MultiHeadAttention(512, 8).head_width == 64


def test_grouped_heads_shrink_keys_and_values_only():
    attention = nn.MultiHeadAttention(64, 8, kv_heads=2)
    assert count(attention) == 2 * 64 * 64 + 2 * 64 * 16


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_is_the_formula(kv_heads):
    attention = nn.MultiHeadAttention(32, 4, kv_heads=kv_heads).double()
    x, memory = torch.randn(2, 7, 32).double(), torch.randn(2, 5, 32).double()
    assert_close(attention(x), by_hand(attention, x))
    assert_close(attention(x, memory), by_hand(attention, x, memory))
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    assert_close(attention(x, mask=masks.causal()), by_hand(attention, x, hidden=future))


def test_values_may_differ_from_keys_in_content_and_width():
    attention = nn.MultiHeadAttention(32, 4, key_width=12, value_width=20)
    x, keys, values = torch.randn(2, 7, 32), torch.randn(2, 5, 12), torch.randn(2, 5, 20)
    assert attention(x, keys, values).shape == (2, 7, 32)
    shuffled = torch.randperm(5)
    again = attention(x, keys[:, shuffled], values[:, shuffled])
    assert_close(attention(x, keys, values), again, atol=1e-6, rtol=1e-5)


def test_head_width_of_its_own():
    attention = nn.MultiHeadAttention(32, 4, head_width=16)
    assert attention.q_proj.weight.shape == (64, 32)
    assert attention(torch.randn(1, 3, 32)).shape == (1, 3, 32)


def test_bias_reaches_the_scores():
    attention = nn.MultiHeadAttention(16, 2)
    x = torch.randn(1, 4, 16)
    diagonal = torch.full((4, 4), -math.inf).fill_diagonal_(0)
    alone = attention.out_proj(attention.v_proj(x))
    assert_close(attention(x, bias=biases.dense(diagonal)), alone, atol=1e-6, rtol=1e-5)


def test_normalised_queries_and_keys_bound_the_logits():
    attention = nn.MultiHeadAttention(32, 4, qk_norm=True)
    _, seen = attention(1e4 * torch.randn(2, 50, 32), trace=True)
    assert seen.max_logit.max() <= math.sqrt(8) * (1 + 1e-5)
    assert count(attention) == 4 * 32 * 32 + 2 * 8


def test_a_trace_has_the_same_output_and_every_weight():
    attention = nn.MultiHeadAttention(32, 4, kv_heads=2)
    x = torch.randn(2, 9, 32)
    y, seen = attention(x, mask=masks.causal(), trace=True)
    assert isinstance(seen, regard.Trace)
    assert_close(y, attention(x, mask=masks.causal()), atol=1e-6, rtol=1e-5)
    weights = seen.weights()
    assert weights.shape == (2, 4, 9, 9)
    assert_close(weights.sum(-1), torch.ones(2, 4, 9))
    assert (weights.triu(1) == 0).all()


def test_dropout_only_in_training():
    attention = nn.MultiHeadAttention(32, 4, dropout=0.5)
    x = torch.randn(1, 20, 32)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


def test_gradients_reach_every_parameter():
    attention = nn.MultiHeadAttention(
        16, 4, kv_heads=2, bias=True, qk_norm=True, rotary=nn.Rotary()
    )
    attention(torch.randn(2, 5, 16), mask=masks.causal()).square().sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_a_bias_of_keys_changes_nothing():
    attention = nn.MultiHeadAttention(16, 2, bias=True)
    x = torch.randn(1, 6, 16)
    before = attention(x)
    torch.nn.init.normal_(attention.k_proj.bias)
    assert_close(attention(x), before, atol=1e-5, rtol=1e-4)


def test_a_row_that_sees_nothing_gives_zero():
    attention = nn.MultiHeadAttention(16, 2)
    x = torch.randn(2, 4, 16, requires_grad=True)
    y = attention(x, mask=masks.padding([4, 0]))
    assert (y[1] == 0).all()
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_autocast_runs_in_the_lower_precision():
    attention = nn.MultiHeadAttention(32, 4, kv_heads=2, rotary=nn.Rotary(), qk_norm=True)
    x = torch.randn(2, 9, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = attention(x, mask=masks.causal())
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), attention(x, mask=masks.causal()), atol=3e-2, rtol=3e-2)


def test_gradient_checkpointing_changes_nothing():
    attention = nn.MultiHeadAttention(32, 4, rotary=nn.Rotary(), dropout=0.3)
    x = torch.randn(2, 9, 32)
    gradients = []
    for run in (attention, lambda t: checkpoint(attention, t, use_reentrant=False)):
        torch.manual_seed(1)
        attention.zero_grad()
        run(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in attention.parameters()])
    assert_close(gradients[0], gradients[1])


laws = settings(max_examples=20, deadline=None, derandomize=True)


@laws
@given(n=st.integers(1, 17), seed=st.integers(0, 2**16))
def test_permuting_words_permutes_answers(n, seed):
    torch.manual_seed(seed)
    attention = nn.MultiHeadAttention(12, 3).double()
    x, order = torch.randn(2, n, 12).double(), torch.randperm(n)
    assert_close(attention(x[:, order]), attention(x)[:, order])


@laws
@given(batch=st.integers(1, 5), n=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_batch_entries_do_not_meet(batch, n, seed):
    torch.manual_seed(seed)
    attention = nn.MultiHeadAttention(8, 4, kv_heads=2, rotary=nn.Rotary()).double()
    x = torch.randn(batch, n, 8).double()
    together = attention(x, mask=masks.causal())
    apart = [attention(row[None], mask=masks.causal()) for row in x]
    assert_close(together, torch.cat(apart))


@laws
@given(n=st.integers(2, 17), seed=st.integers(0, 2**16))
def test_the_future_does_not_matter(n, seed):
    torch.manual_seed(seed)
    attention = nn.MultiHeadAttention(8, 2, rotary=nn.Rotary()).double()
    x, cut = torch.randn(1, n, 8).double(), n // 2
    whole = attention(x, mask=masks.causal())
    assert_close(whole[:, :cut], attention(x[:, :cut], mask=masks.causal()))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"d_model": 10, "heads": 3},
            "heads share d_model evenly\n"
            "  got:      d_model=10, heads=3\n"
            "  accepted: a number of heads that divides d_model\n"
            "  do:       or set head_width= for heads of another width",
        ),
        (
            {"d_model": 12, "heads": 6, "kv_heads": 4},
            "query heads share key heads evenly\n"
            "  got:      heads=6, kv_heads=4\n"
            "  accepted: kv_heads that divides heads",
        ),
        (
            {"d_model": 9, "heads": 3, "rotary": nn.Rotary()},
            "rotary positions turn pairs of numbers\n"
            "  got:      a width of 3 in heads 3 wide\n"
            "  accepted: an even width, 2 to 3\n"
            "  do:       set Rotary(width=...) to turn only a part of each head",
        ),
    ],
)
def test_refuses_what_cannot_be_built(arguments, text):
    with pytest.raises(regard.RegardError) as error:
        nn.MultiHeadAttention(**arguments)
    assert str(error.value) == text


def test_refuses_inputs_of_another_width():
    with pytest.raises(regard.RegardError) as error:
        nn.MultiHeadAttention(16, 2)(torch.zeros(1, 3, 12))
    assert str(error.value) == (
        "the inputs are not as wide as this module was made for\n"
        "  got:      queries 12, keys 12, values 12 wide\n"
        "  accepted: queries 16, keys 16, values 16 wide\n"
        "  do:       set d_model, key_width= and value_width="
    )


def test_refuses_memory_with_rotary_or_cache():
    x = torch.zeros(1, 3, 16)
    with pytest.raises(regard.RegardError, match="compare places of one sequence"):
        nn.MultiHeadAttention(16, 2, rotary=nn.Rotary())(x, x)
    with pytest.raises(regard.RegardError, match="cache= together with memory="):
        nn.MultiHeadAttention(16, 2)(x, x, cache=nn.Cache())


def test_print_shows_the_heads():
    attention = nn.MultiHeadAttention(64, 8, kv_heads=2, dropout=0.1, rotary=nn.Rotary())
    assert "heads=8, kv_heads=2, head_width=8, Rotary(base=10000.0" in repr(attention)


@pytest.mark.compiled
@pytest.mark.parametrize("trace", [False, True])
def test_compiles_as_one_graph(trace):
    attention = nn.MultiHeadAttention(32, 4, kv_heads=2, rotary=nn.Rotary(), qk_norm=True)
    x = torch.randn(2, 9, 32)

    def call(x):
        answer = attention(x, mask=masks.causal(), trace=trace)
        return (answer[0], answer[1].entropy) if trace else answer

    run = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_close(run(x), call(x), atol=1e-6, rtol=1e-5)


@pytest.mark.compiled
def test_compiled_gradients():
    attention = nn.MultiHeadAttention(32, 4, rotary=nn.Rotary())
    x = torch.randn(2, 9, 32)
    run = torch.compile(attention, fullgraph=True, backend="aot_eager")
    gradients = []
    for call in (attention, run):
        attention.zero_grad()
        call(x, mask=masks.causal() & masks.padding(torch.tensor([9, 4]))).square().sum().backward()
        gradients.append([p.grad.clone() for p in attention.parameters()])
    assert_close(gradients[1], gradients[0], atol=1e-4, rtol=1e-4)


def test_inputs_of_another_kind_are_explained(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    attention = nn.MultiHeadAttention(16, 4)
    with pytest.raises(regard.RegardError, match=r"\[batch, length, width\]"):
        attention(torch.randn(5, 16))
    with pytest.raises(regard.RegardError, match=r"nn\.Rotary\(\) or None"):
        nn.MultiHeadAttention(16, 4, rotary=True)
