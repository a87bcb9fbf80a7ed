"""Parity with PyTorch's own attention, and where the two differ on purpose.

Forward and backward, but for FlexAttention, which has no backward pass on CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.testing import assert_close

import regard
from regard import biases, masks

BACKENDS = ("sdpa", "tiled", "reference")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def qkv(H: int = 4, G: int = 4, Q: int = 11, K: int = 11) -> list[Tensor]:
    return [numbers(2, H, Q, 8), numbers(2, G, K, 8, seed=1), numbers(2, G, K, 8, seed=2)]


def with_gradients(run: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """The output, and the gradients that one random cotangent gives each input."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, numbers(*out.shape, seed=7))]


def assert_same(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *t: Tensor) -> None:
    got, wanted = with_gradients(ours, *t), with_gradients(theirs, *t)
    assert wanted[0].any()
    assert all(grad.any() for grad in wanted[1:])
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other)


TABLE = numbers(2, 4, 11, 11, seed=3) > -1.0

SDPA: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "scale": ({}, {"scale": 0.7}, {"scale": 0.7}),
    "causal": ({}, {"mask": masks.causal()}, {"is_causal": True}),
    "causal-start": (
        {"Q": 7}, {"mask": masks.causal(offset=0)}, {"is_causal": True},
    ),
    "causal-start-long": (
        {"K": 7}, {"mask": masks.causal(offset=0)}, {"is_causal": True},
    ),
    "booleans": ({}, {"mask": masks.keep(TABLE)}, {"attn_mask": TABLE}),
    "booleans-for-all": (
        {}, {"mask": masks.keep(TABLE[0, 0])}, {"attn_mask": TABLE[0, 0]},
    ),
    "converted": ({}, {"mask": masks.from_sdpa(TABLE)}, {"attn_mask": TABLE}),
    "numbers": (
        {},
        {"bias": biases.dense(numbers(1, 4, 11, 11))},
        {"attn_mask": numbers(1, 4, 11, 11)},
    ),
    "grouped": ({"G": 2}, {"mask": masks.causal()}, {"is_causal": True, "enable_gqa": True}),
    "one-key-head": ({"G": 1}, {}, {"enable_gqa": True}),
}  # fmt: skip


@every_backend
@pytest.mark.parametrize("call", SDPA)
def test_scaled_dot_product_attention(backend: str, call: str) -> None:
    sizes, ours, theirs = SDPA[call]
    assert_same(
        lambda *t: regard.attention(*t, **ours, backend=backend),
        lambda *t: sdpa(*t, **theirs),
        *qkv(**sizes),
    )


@every_backend
def test_causal_is_aligned_to_the_end_where_pytorch_aligns_to_the_start(backend: str) -> None:
    """A decoding step: one query, many keys. PyTorch's is_causal shows it the first key alone."""
    q, k, v = qkv(Q=1)
    ours = regard.attention(q, k, v, mask=masks.causal(), backend=backend)
    assert_close(ours, sdpa(q, k, v))
    theirs = sdpa(q, k, v, is_causal=True)
    assert_close(theirs, v[:, :, :1])
    assert_close(regard.attention(q, k, v, mask=masks.causal(offset=0), backend=backend), theirs)
    assert not torch.allclose(ours, theirs)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("hides", ["nothing", "padding", "future"])
def test_the_weights_of_nn_multihead_attention(heads: int, hides: str) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, heads, batch_first=True, dtype=torch.float64)
    x = numbers(2, 9, 8)
    padding = torch.arange(9) >= torch.tensor([[5], [9]])
    future = torch.ones(9, 9).triu(1).bool()
    mask, options = {
        "nothing": (None, {}),
        "padding": (masks.padding([5, 9]), {"key_padding_mask": padding}),
        "future": (masks.causal(), {"attn_mask": future}),
    }[hides]
    out, weights = theirs(x, x, x, **options, average_attn_weights=False)
    together = nn.functional.linear(x, theirs.in_proj_weight, theirs.in_proj_bias)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in together.chunk(3, dim=-1))
    t = regard.trace(q, k, v, mask=mask)
    assert_close(t.weights(), weights)
    assert_close(t.weights().mean(1), theirs(x, x, x, **options)[1])
    assert_close(theirs.out_proj(t.out.transpose(1, 2).flatten(2)), out)


def test_both_give_nothing_to_a_row_that_sees_nothing() -> None:
    q, k, v = qkv()
    table = TABLE.clone()
    table[:, :, 3] = False
    assert_same(
        lambda *t: regard.attention(*t, mask=masks.keep(table), backend="tiled"),
        lambda *t: sdpa(*t, attn_mask=table),
        q, k, v,
    )  # fmt: skip
    assert not sdpa(q, k, v, attn_mask=table)[:, :, 3].any()


def eager(*args: Any, **options: Any) -> Any:
    """FlexAttention as its own reference: not compiled, about which it warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return flex_attention(*args, **options)


def block_mask(rule: Callable[..., Tensor], Q: int, K: int) -> Any:
    return create_block_mask(rule, 2, 4, Q, K, device="cpu")


IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [0] * 6 + [1] * 5])
LENGTHS = torch.tensor([6, 11])
SLOPES = torch.tensor([0.1, 0.3, 0.5, 1.0], dtype=torch.float64)
CURVE = numbers(4, 7, seed=5)

FLEX_MASKS: dict[str, tuple[masks.Mask, Callable[..., Tensor]]] = {
    "causal": (masks.causal(), lambda b, h, q, k: q >= k),
    "window": (masks.window(3, 2), lambda b, h, q, k: (q - k <= 3) & (k - q <= 2)),
    "causal-window": (
        masks.causal() & masks.window(3), lambda b, h, q, k: (q >= k) & (q - k <= 3),
    ),
    "padding": (masks.padding(LENGTHS), lambda b, h, q, k: k < LENGTHS[b]),
    "documents": (
        masks.causal() & masks.documents(IDS),
        lambda b, h, q, k: (q >= k) & (IDS[b, q] == IDS[b, k]),
    ),
    "prefix": (masks.causal() | masks.prefix(4), lambda b, h, q, k: (q >= k) | (k < 4)),
    "dilated": (masks.dilated(3), lambda b, h, q, k: (q - k) % 3 == 0),
    "keep": (masks.keep(TABLE), lambda b, h, q, k: TABLE[b, h, q, k]),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("kind", FLEX_MASKS)
def test_masks_of_flex_attention(backend: str, kind: str) -> None:
    ours, rule = FLEX_MASKS[kind]
    tensors = qkv()
    got = regard.attention(*tensors, mask=ours, backend=backend)
    assert_close(got, eager(*tensors, block_mask=block_mask(rule, 11, 11)))


FLEX_SCORES: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "softcap": ({"softcap": 1.5}, lambda s, b, h, q, k: 1.5 * torch.tanh(s / 1.5)),
    "alibi": (
        {"bias": biases.alibi(SLOPES)}, lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    ),
    "relative": (
        {"bias": biases.relative(CURVE)},
        lambda s, b, h, q, k: s + CURVE[h, (k - q).clamp(-3, 3) + 3],
    ),
    "softcap-then-alibi": (
        {"softcap": 1.5, "bias": biases.alibi(SLOPES)},
        lambda s, b, h, q, k: 1.5 * torch.tanh(s / 1.5) - SLOPES[h] * (q - k).abs(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("kind", FLEX_SCORES)
def test_scores_of_flex_attention(backend: str, kind: str, groups: int) -> None:
    ours, rule = FLEX_SCORES[kind]
    tensors = qkv(G=groups)
    got = regard.attention(*tensors, **ours, backend=backend)
    assert_close(got, eager(*tensors, score_mod=rule, enable_gqa=groups != 4))


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_lse_of_flex_attention(backend: str) -> None:
    q, k, v = qkv()
    out, lse = eager(
        q, k, v, block_mask=block_mask(lambda b, h, q, k: q >= k, 11, 11), return_lse=True
    )
    t = regard.trace(q, k, v, mask=masks.causal(), backend=backend)
    assert_close(t.out, out)
    assert_close(t.lse, lse)
