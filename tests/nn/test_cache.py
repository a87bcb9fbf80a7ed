import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import regard
from regard import biases, masks, nn


def decode(attention, x, steps, cache, mask):
    """The answers of attention fed a few tokens at a time."""
    parts = [attention(part, mask=mask, cache=cache) for part in x.split(steps, dim=1)]
    return torch.cat(parts, 1)


VARIANTS = {
    "plain": {},
    "rotary": {"rotary": nn.Rotary()},
    "grouped": {"kv_heads": 2},
    "rotary, grouped, normalised": {"rotary": nn.Rotary(), "kv_heads": 1, "qk_norm": True},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("steps", [[1] * 11, [4, 1, 1, 5], [11]])
def test_decoding_equals_the_whole(options, steps):
    attention = nn.MultiHeadAttention(32, 4, **options).double()
    x = torch.randn(2, 11, 32).double()
    whole = attention(x, mask=masks.causal())
    assert_close(decode(attention, x, steps, nn.Cache(), masks.causal()), whole)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    window=st.integers(0, 9),
    named=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_a_sliding_cache_equals_a_window(steps, window, named, kv_heads):
    attention = nn.MultiHeadAttention(16, 4, kv_heads=kv_heads, rotary=nn.Rotary()).double()
    x = torch.randn(1, sum(steps), 16).double()
    whole = attention(x, mask=masks.causal() & masks.window(window))
    mask = masks.causal() & masks.window(window) if named else masks.causal()
    cache = nn.Cache(window=window)
    assert_close(decode(attention, x, steps, cache, mask), whole)
    assert len(cache) == min(window, sum(steps))
    assert cache.position == sum(steps)


def test_decoding_with_a_bias_of_distance():
    attention = nn.MultiHeadAttention(16, 2).double()
    x = torch.randn(1, 8, 16).double()
    alibi = biases.alibi(torch.tensor([0.5, 0.1]).double())
    whole = attention(x, mask=masks.causal() & masks.window(3), bias=alibi)
    cache = nn.Cache(window=3)
    steps = [attention(t, mask=masks.causal(), bias=alibi, cache=cache) for t in x.split(1, 1)]
    assert_close(torch.cat(steps, 1), whole)


def test_decoding_a_batch_of_different_lengths():
    attention = nn.MultiHeadAttention(16, 2).double()
    x, lengths = torch.randn(2, 6, 16).double(), masks.padding([6, 4])
    whole = attention(x, mask=masks.causal() & lengths)
    assert_close(decode(attention, x, [4, 1, 1], nn.Cache(), masks.causal() & lengths), whole)


def test_a_step_leaves_a_trace():
    attention, cache = nn.MultiHeadAttention(16, 2), nn.Cache()
    attention(torch.randn(1, 7, 16), mask=masks.causal(), cache=cache)
    _, seen = attention(torch.randn(1, 1, 16), mask=masks.causal(), cache=cache, trace=True)
    assert seen.weights().shape == (1, 2, 1, 8)
    assert_close(seen.weights().sum(-1), torch.ones(1, 2, 1))


def test_gradients_pass_through_the_cache():
    attention = nn.MultiHeadAttention(8, 2, rotary=nn.Rotary()).double()
    x = torch.randn(1, 5, 8).double().requires_grad_()
    (whole,) = torch.autograd.grad(attention(x, mask=masks.causal()).square().sum(), x)
    stepped = decode(attention, x, [2, 2, 1], nn.Cache(), masks.causal())
    assert_close(torch.autograd.grad(stepped.square().sum(), x)[0], whole)


def test_reset_and_reorder():
    cache = nn.Cache()
    k, v = torch.randn(2, 3, 1, 4, 8)
    cache.append(k, v)
    cache.reorder(torch.tensor([2, 0]))
    assert torch.equal(cache.keys, k[[2, 0]])
    assert torch.equal(cache.values, v[[2, 0]])
    assert repr(cache) == "Cache(holds 4 of 4)"
    cache.reset()
    assert (len(cache), cache.position) == (0, 0)


def test_refuses_masks_of_place_once_keys_are_gone():
    attention, cache = nn.MultiHeadAttention(8, 2), nn.Cache(window=2)
    x, mask = torch.randn(1, 2, 8), masks.causal() & masks.padding([2])
    attention(x, mask=mask, cache=cache)
    attention(x[:, :1], mask=mask, cache=cache)
    with pytest.raises(regard.RegardError) as error:
        attention(x[:, :1], mask=mask, cache=cache)
    assert str(error.value) == (
        "causal() & padding([2]) names keys by their position, and this cache has dropped the "
        "first ones\n"
        "  got:      a cache that holds 2 of 3 tokens\n"
        "  accepted: masks of distance alone: causal(), window(w), dilated(step)\n"
        "  do:       use Cache() with & masks.window(2) in the mask"
    )
    assert cache.position == 3


def test_refuses_another_batch():
    cache = nn.Cache()
    cache.append(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))
    with pytest.raises(regard.RegardError) as error:
        cache.append(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
    assert str(error.value) == (
        "the cache holds keys of another call\n"
        "  got:      keys [B 1, heads 1, width 4] after keys [B 2, heads 1, width 4]\n"
        "  accepted: one cache per attention module and batch\n"
        "  do:       make a new Cache(), or cache.reset()"
    )


def test_refuses_a_negative_window():
    with pytest.raises(regard.RegardError, match="window counts tokens besides the query itself"):
        nn.Cache(window=-1)


@pytest.mark.compiled
@pytest.mark.parametrize("window", [None, 3])
def test_decoding_compiles_as_one_graph(window):
    attention = nn.MultiHeadAttention(16, 2, rotary=nn.Rotary())
    x = torch.randn(1, 9, 16)
    mask = masks.causal() if window is None else masks.causal() & masks.window(window)
    run = torch.compile(attention, fullgraph=True, backend="eager")
    with torch.no_grad():
        stepped = decode(run, x, [3, 1, 1, 1, 1, 1, 1], nn.Cache(window), masks.causal())
        assert_close(stepped, attention(x, mask=mask), atol=1e-6, rtol=1e-5)


@pytest.mark.compiled
@pytest.mark.parametrize("window", [None, 5])
def test_long_decoding_compiles_a_few_graphs_only(window):
    attention, cache = nn.MultiHeadAttention(16, 2, rotary=nn.Rotary()), nn.Cache(window)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(attention, fullgraph=True, backend=keep)
    with torch.no_grad():
        for part in torch.randn(1, 40, 16).split([8] + [1] * 32, dim=1):
            run(part, mask=masks.causal(), cache=cache)
    assert len(graphs) <= 4


@pytest.mark.parametrize("steps", [[1] * 6, [3, 3], [6]], ids=str)
def test_a_sliding_cache_alone_is_a_window(steps):
    attention, x = nn.MultiHeadAttention(16, 2).double(), torch.randn(1, 6, 16).double()
    whole = attention(x, mask=masks.window(2))
    assert_close(decode(attention, x, steps, nn.Cache(window=2), None), whole)


@pytest.mark.parametrize(
    ("mask", "bias"),
    [
        (masks.causal(offset=5), None),
        (masks.causal() & masks.window(2, offset=5), None),
        (~masks.causal(offset=5) | masks.causal(), None),
        (masks.causal(), biases.relative(torch.zeros(1, 3), offset=5)),
        (masks.causal(), biases.alibi([0.5, 0.1], offset=5)),
        (masks.causal(), biases.pairwise(lambda b, h, q, k: 0.1 * k)),
    ],
)
def test_offsets_are_refused_once_the_first_keys_are_gone(mask, bias):
    """They count from the first key, so that queries saw what comes after them, or nothing."""
    attention, cache = nn.MultiHeadAttention(16, 2), nn.Cache(window=4)
    attention(torch.randn(1, 5, 16), mask=masks.causal(), cache=cache)
    with pytest.raises(regard.RegardError, match="has dropped the first ones") as error:
        attention(torch.randn(1, 3, 16), mask=mask, bias=bias, cache=cache)
    way_out = "leave out offset=" if "offset" in str(error.value) else "use Cache() with"
    assert way_out in str(error.value)


def test_offsets_count_while_all_keys_are_there():
    attention = nn.MultiHeadAttention(16, 2).double()
    x = torch.randn(1, 8, 16).double()
    whole = attention(x, mask=masks.causal() & masks.window(6))
    for cache in (nn.Cache(), nn.Cache(window=6)):
        some = [
            attention(part, mask=masks.causal(offset=n) & masks.window(6), cache=cache)
            for n, part in ((0, x[:, :5]), (5, x[:, 5:]))
        ]
        assert_close(torch.cat(some, 1), whole)


@pytest.mark.parametrize("trace", [False, True])
def test_a_call_that_is_refused_leaves_the_cache_as_it_was(trace):
    attention, cache = nn.MultiHeadAttention(16, 2).double(), nn.Cache()
    x = torch.randn(1, 6, 16).double()
    first = attention(x[:, :5], mask=masks.causal(), cache=cache)
    wrong = masks.keep(torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(regard.RegardError, match="fits neither"):
        attention(x[:, 5:], mask=wrong, cache=cache, trace=trace)
    assert (len(cache), cache.position) == (5, 5)
    last = attention(x[:, 5:], mask=masks.causal(), cache=cache)
    assert_close(torch.cat([first, last], 1), attention(x, mask=masks.causal()))


@pytest.mark.parametrize("window", [1.5, "3", True])
def test_a_window_is_a_whole_number(window, monkeypatch):
    # Wrong types reach regard's own checks even when the shape-checking hook is on.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(regard.RegardError, match="Cache: window must be a whole number"):
        nn.Cache(window=window)
