"""Masks of other libraries: run the original where it is at hand, else follow its stated rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import RegardError, masks


def normal(*axes: int, seed: int = 0) -> Tensor:
    return torch.randn(axes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def coins(*axes: int, seed: int = 1) -> Tensor:
    """True and False by chance, with the first key always True."""
    table = torch.rand(axes, generator=torch.Generator().manual_seed(seed)) < 0.5
    table[..., 0] = True
    return table


@pytest.mark.parametrize("axes", [(5, 7), (2, 3, 5, 7), (2, 1, 5, 7), (1, 3, 5, 7), (2, 1, 1, 7)])
def test_sdpa_masks(axes):
    q, k, v = normal(2, 3, 5, 4), normal(2, 3, 7, 4, seed=1), normal(2, 3, 7, 4, seed=2)
    table = coins(*axes)
    want = scaled_dot_product_attention(q, k, v, attn_mask=table)
    torch.testing.assert_close(regard.attention(q, k, v, mask=masks.from_sdpa(table)), want)


@pytest.mark.parametrize(("Q", "K"), [(6, 6), (3, 7), (7, 3), (1, 5)])
def test_sdpa_causal_aligns_to_the_start(Q, K):
    q, k, v = normal(2, 3, Q, 4), normal(2, 3, K, 4, seed=1), normal(2, 3, K, 4, seed=2)
    want = scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = masks.from_sdpa(is_causal=True)
    torch.testing.assert_close(regard.attention(q, k, v, mask=mask), want)
    if Q != K:
        ours = regard.attention(q, k, v, mask=masks.causal())
        assert not torch.allclose(ours, want)


@pytest.mark.parametrize(("Q", "K"), [(6, 6), (3, 7), (1, 5)])
@pytest.mark.parametrize("made", [causal_upper_left, causal_lower_right])
def test_sdpa_causal_bias(made, Q, K):
    q, k, v = normal(2, 3, Q, 4), normal(2, 3, K, 4, seed=1), normal(2, 3, K, 4, seed=2)
    want = scaled_dot_product_attention(q, k, v, attn_mask=made(Q, K))
    mask = masks.from_sdpa(made(Q, K))
    torch.testing.assert_close(regard.attention(q, k, v, mask=mask), want)


def test_sdpa_causal_bias_beside_is_causal_is_refused():
    said = r"a CausalBias says by itself what is causal\s+got: +UPPER_LEFT and is_causal=True"
    with pytest.raises(RegardError, match=said):
        masks.from_sdpa(causal_upper_left(3, 3), is_causal=True)


@pytest.mark.usefixtures("without_hook")
def test_a_causal_bias_as_a_mask_names_its_converter():
    with pytest.raises(RegardError, match=r"do: +masks\.from_sdpa\(t\)"):
        regard.attention(*3 * [normal(1, 2, 3, 4)], mask=causal_upper_left(3, 3))


def test_sdpa_mask_and_causal_both_hold():
    table = coins(5, 5)
    both = masks.from_sdpa(table, is_causal=True)
    assert torch.equal(both.dense(5)[0, 0], table & torch.ones(5, 5).bool().tril())


def test_nothing_to_convert_is_no_mask():
    assert masks.from_sdpa() is None
    assert masks.from_multihead() is None
    assert masks.from_huggingface() is None
    assert masks.from_flash() is None


WIDTH, HEADS = 12, 3


def multihead(x: Tensor, memory: Tensor, mask: masks.Mask, layer: torch.nn.MultiheadAttention):
    """nn.MultiheadAttention's own parameters, with regard's attention between them."""
    parts = zip(
        layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), (x, memory, memory), strict=True
    )
    q, k, v = ((t @ W.mT + b).unflatten(-1, (HEADS, -1)).transpose(1, 2) for W, b, t in parts)
    out = regard.attention(q, k, v, mask=mask)
    return layer.out_proj(out.transpose(1, 2).flatten(2))


@pytest.fixture
def layer() -> torch.nn.MultiheadAttention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
        torch.nn.init.normal_(layer.in_proj_bias)
    return layer


@pytest.mark.parametrize(
    ("axes", "padding"),
    [
        (None, True),
        ((5, 7), False),
        ((5, 7), True),
        ((2 * HEADS, 5, 7), False),
        ((2 * HEADS, 5, 7), True),
    ],
    ids=["padding", "2-D", "2-D-padding", "3-D", "3-D-padding"],
)
@pytest.mark.parametrize("weights", [False, True], ids=["fused", "weights"])
def test_multihead_attention(layer, axes, padding, weights):
    x, memory = normal(2, 5, WIDTH, seed=3), normal(2, 7, WIDTH, seed=4)
    attn_mask = None if axes is None else ~coins(*axes)
    key_padding_mask = ~coins(2, 7, seed=5) if padding else None
    want, _ = layer(
        x, memory, memory,
        key_padding_mask=key_padding_mask, attn_mask=attn_mask, need_weights=weights,
    )  # fmt: skip
    mask = masks.from_multihead(attn_mask, key_padding_mask, heads=HEADS)
    torch.testing.assert_close(multihead(x, memory, mask, layer), want)
    opposite = multihead(x, memory, ~mask, layer)
    assert not torch.allclose(opposite, want)


@pytest.mark.parametrize(("Q", "K"), [(9, 9), (3, 9), (1, 9)])
@pytest.mark.parametrize("W", [1, 2, 5, 20])
def test_huggingface_causal_window_counts_the_query(W, Q, K, by_hand):
    mask = masks.from_huggingface(is_causal=True, sliding_window=W)
    dense = mask.dense(Q, K)
    assert torch.equal(dense, by_hand(lambda x: x.p - W < x.j <= x.p, 1, 1, Q, K))
    assert int(dense[0, 0, -1].sum()) == min(W, K)


@pytest.mark.parametrize("W", [1, 2, 5, 20])
def test_huggingface_two_sided_window_does_not_count_the_query(W, by_hand):
    mask = masks.from_huggingface(sliding_window=W)
    dense = mask.dense(11)
    assert torch.equal(dense, by_hand(lambda x: abs(x.p - x.j) <= W, 1, 1, 11, 11))
    assert int(dense[0, 0, 5].sum()) == min(2 * W + 1, 11)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_huggingface_one_may_be_seen(dtype, by_hand):
    ones = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    mask = masks.from_huggingface(ones.to(dtype), is_causal=True)
    rule = lambda x: bool(ones[x.b, x.j]) and x.j <= x.p  # noqa: E731
    assert torch.equal(mask.dense(3, 5), by_hand(rule, 2, 1, 3, 5))


def test_huggingface_offset_places_the_first_query(by_hand):
    mask = masks.from_huggingface(is_causal=True, sliding_window=2, offset=1)
    rule = lambda x: x.p - 2 < x.j <= x.p  # noqa: E731
    assert torch.equal(mask.dense(3, 8), by_hand(rule, 1, 1, 3, 8, offset=1))


@pytest.mark.parametrize(("Q", "K"), [(8, 8), (3, 8), (8, 3)])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("window", [(-1, -1), (2, -1), (-1, 2), (2, 1), (0, 0), (30, 30)], ids=str)
def test_flash_attention(window, causal, Q, K, by_hand):
    left, right = window

    def rule(x):
        return (
            (left < 0 or x.j >= x.p - left)
            and (right < 0 or x.j <= x.p + right)
            and (not causal or x.j <= x.p)
        )

    mask = masks.from_flash(causal=causal, window_size=window)
    want = by_hand(rule, 1, 1, Q, K)
    assert want.all() if mask is None else torch.equal(mask.dense(Q, K), want)


def test_one_width_means_different_things():
    seen = {
        "regard": masks.causal() & masks.window(4),
        "flash": masks.from_flash(causal=True, window_size=(4, -1)),
        "huggingface": masks.from_huggingface(is_causal=True, sliding_window=4),
    }
    assert {name: int(m.dense(16)[0, 0, -1].sum()) for name, m in seen.items()} == {
        "regard": 5,
        "flash": 5,
        "huggingface": 4,
    }


@pytest.mark.usefixtures("without_hook")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: masks.from_sdpa(torch.zeros(3, 3)),
            ["from_sdpa: a float mask is a bias", "torch.float32", "bias=regard.biases.dense(t)"],
        ),
        (
            lambda: masks.from_sdpa(torch.ones(2, 3, 3).bool()),
            ["could mean several things", "[2, 3, 3]", "[Q, K] or [B, H, Q, K]"],
        ),
        (
            lambda: masks.from_multihead(torch.zeros(3, 3)),
            ["from_multihead: a float mask is a bias", "regard.biases.dense"],
        ),
        (
            lambda: masks.from_multihead(key_padding_mask=torch.zeros(2, 3)),
            ["from_multihead: a float mask is a bias"],
        ),
        (
            lambda: masks.from_multihead(torch.ones(6, 3, 3).bool()),
            ["stacks batch and heads", "[6, 3, 3] with heads=None", "heads= that divides"],
        ),
        (
            lambda: masks.from_multihead(torch.ones(6, 3, 3).bool(), heads=4),
            ["[6, 3, 3] with heads=4"],
        ),
        (
            lambda: masks.from_huggingface(torch.ones(2, 1, 3, 3).bool()),
            ["one 0 or 1 per key", "torch.bool [2, 1, 3, 3]", "masks.keep"],
        ),
        (
            lambda: masks.from_huggingface(torch.zeros(2, 3)),
            ["one 0 or 1 per key", "torch.float32", "biases.dense"],
        ),
    ],
)  # fmt: skip
def test_what_converters_refuse(make, words):
    with pytest.raises(RegardError) as error:
        make()
    for word in words:
        assert word in str(error.value)
