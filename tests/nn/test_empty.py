"""Sequences of no tokens, and batches of no entries: a last step that generates nothing, a shard
that is out of texts, a retrieval that found nothing."""

import pytest
import torch
from torch.testing import assert_close

from regard import linear, masks, nn

EMPTY = [(0, 5), (2, 0), (0, 0)]


@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("rotary", [None, nn.Rotary()])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_multihead_of_nothing_gives_nothing(shape, rotary, kv_heads):
    attention = nn.MultiHeadAttention(16, 4, kv_heads=kv_heads, rotary=rotary, qk_norm=True)
    x = torch.randn(*shape, 16)
    out, seen = attention(x, mask=masks.causal(), trace=True)
    assert out.shape == x.shape
    assert seen.weights().shape == (shape[0], 4, shape[1], shape[1])


def test_multihead_that_looks_at_nothing_gives_its_output_bias():
    attention = nn.MultiHeadAttention(16, 4, bias=True)
    torch.nn.init.normal_(attention.out_proj.bias)
    out = attention(torch.randn(2, 3, 16), torch.randn(2, 0, 16))
    assert_close(out, attention.out_proj.bias.expand(2, 3, 16))


def test_a_step_of_no_tokens_leaves_a_cache_as_it_was():
    attention, cache = nn.MultiHeadAttention(16, 4).eval(), nn.Cache()
    x = torch.randn(2, 7, 16)
    parts = (x[:, :4], x[:, 4:4], x[:, 4:])
    steps = [attention(part, mask=masks.causal(), cache=cache) for part in parts]
    assert cache.position == 7
    assert_close(torch.cat(steps, 1), attention(x, mask=masks.causal()))


@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("trace", [False, True])
def test_linear_attention_of_nothing_gives_nothing(shape, trace):
    attention, x = nn.LinearAttention(16, 4), torch.randn(*shape, 16)
    out = attention(x, mask=masks.causal(), trace=trace)
    assert (out[0] if trace else out).shape == x.shape


def test_a_step_of_no_tokens_leaves_a_state_as_it_was():
    attention, state = nn.LinearAttention(16, 4), linear.State()
    x = torch.randn(2, 7, 16)
    parts = (x[:, :4], x[:, 4:4], x[:, 4:])
    steps = [attention(part, mask=masks.causal(), state=state) for part in parts]
    assert state.tokens == 7
    assert_close(torch.cat(steps, 1), attention(x, mask=masks.causal()))


MASKS = {
    "none": lambda B, Q, K: None,
    "booleans": lambda B, Q, K: torch.zeros(Q, K, dtype=torch.bool),
    "booleans for each head": lambda B, Q, K: torch.zeros(B * 4, Q, K, dtype=torch.bool),
    "floats": lambda B, Q, K: torch.zeros(Q, K),
    "floats for each head": lambda B, Q, K: torch.zeros(B * 4, Q, K),
}


@pytest.mark.parametrize(("B", "Q", "K"), [(2, 0, 3), (0, 3, 3), (0, 0, 0)])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_a_drop_in_of_nothing_answers_as_pytorch(B, Q, K, need_weights, mask):
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    ours = nn.DropIn.of(theirs)
    q, k = torch.randn(B, Q, 16), torch.randn(B, K, 16)
    given = {"attn_mask": MASKS[mask](B, Q, K), "need_weights": need_weights}
    out, weights = ours(q, k, k, **given)
    assert out.shape == (B, Q, 16)
    assert (weights is None) == (not need_weights)
    assert weights is None or weights.shape == (B, Q, K)
