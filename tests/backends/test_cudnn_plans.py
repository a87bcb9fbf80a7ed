"""What cuDNN is given: layouts that do not change from call to call, and plans of our own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard import masks
from regard.backends import cudnn_plans


def laid_out(shape: tuple[int, ...], order: tuple[int, ...], wider: int = 0) -> Tensor:
    """Random numbers whose axes lie in memory in some order, perhaps in longer rows."""
    *first, width = [shape[axis] for axis in order]
    inside = torch.randn(*first, width + wider)[..., :width]
    return inside.permute(*(order.index(axis) for axis in range(len(shape))))


ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)]


@given(
    st.tuples(*[st.integers(1, 3)] * 3, st.integers(2, 5)), st.sampled_from(ORDERS),
    st.integers(0, 3), st.integers(2, 5), st.sampled_from(ORDERS), st.integers(0, 3),
)  # fmt: skip
def test_rows_lie_in_the_order_of_the_queries(
    shape: tuple[int, ...], order: tuple[int, ...], wider: int, width: int,
    other: tuple[int, ...], longer: int,
) -> None:  # fmt: skip
    q = laid_out(shape, order, wider)
    t = laid_out((*shape[:3], width), other, longer)
    found = cudnn_plans.in_order(t, q)
    assert torch.equal(found, t)
    # An output as PyTorch allocates it: dense, and like the queries where it has their shape.
    like = torch.empty_like(q.expand_as(q))
    want = like if width == shape[3] else laid_out(t.shape, order)
    for n, mine, its in zip(t.shape, found.stride(), want.stride(), strict=True):
        assert n == 1 or mine == its
    assert cudnn_plans.lies_in_order(found, q)
    assert cudnn_plans.in_order(found, q) is found


def test_calls_are_marked_as_ours() -> None:
    """By another share of dropped weights, of the same weights."""
    assert math.copysign(1.0, cudnn_plans._marked(0.0)) == -1.0
    assert not cudnn_plans._marked(0.0)
    assert 0.1 < cudnn_plans._marked(0.1) < 0.1 + 1e-15


@pytest.mark.parametrize("how", ["dense", "turned", "longer rows", "one for all"])
def test_gradients_arrive_as_the_output_lies(how: str) -> None:
    # PyTorch's CPU operator has a node of the same kind.
    q = laid_out((2, 3, 5, 8), (0, 2, 1, 3)).requires_grad_()
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    g = {
        "dense": laid_out((2, 3, 5, 8), (0, 1, 2, 3)),
        "turned": laid_out((2, 3, 5, 8), (0, 2, 1, 3)),
        "longer rows": laid_out((2, 3, 5, 8), (0, 1, 2, 3), 8),
        "one for all": torch.ones(()).expand(2, 3, 5, 8),
    }[how]
    want = torch.autograd.grad(out, q, g, retain_graph=True)[0]
    seen: list[Any] = []
    cudnn_plans.order_gradient(out.grad_fn, out.stride())
    out.grad_fn.register_prehook(lambda given: seen.append(given[0]))
    assert torch.allclose(torch.autograd.grad(out, q, g)[0], want)
    assert torch.equal(seen[0], g)
    assert seen[0].stride() == out.stride()


def _on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not _on_hopper(), reason="elsewhere PyTorch does not give cuDNN such calls")
@pytest.mark.parametrize("call", ["attention", "trace", "triton", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first", ORDERS[:2])
def test_gradients_are_right_whatever_came_first(
    first: tuple[int, ...], causal: bool, call: str
) -> None:
    # A length that no other test has: no plan is there.
    n = 1096 + 8 * (8 * ORDERS.index(first) + 4 * causal)
    n += 8 * ["attention", "trace", "triton", "sdpa"].index(call)
    shape = (2, 4, n, 64)

    def on_card(order: tuple[int, ...], wider: int = 0) -> Tensor:
        return laid_out(shape, order, wider).to("cuda", torch.bfloat16)

    q, k, v = (on_card((0, 2, 1, 3)).requires_grad_() for _ in range(3))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.autograd.grad(plain, (q, k, v), on_card(first))
    mask = masks.causal() if causal else None
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = regard.attention(*exact, mask=mask, backend="reference")
    for order, wider in ((first, 0), (ORDERS[0], 0), (ORDERS[1], 0), (ORDERS[0], 64)):
        g = on_card(order, wider)
        # As memory with the numbers of longer rows, which is not what they are in on a GPU.
        g = torch.nn.functional.pad(g, (0, wider))[..., :64] if wider else g
        for _ in range(3):
            if call == "trace":
                out = regard.trace(q, k, v, mask=mask).out
            else:
                name = None if call == "attention" else call
                out = regard.attention(q, k, v, mask=mask, backend=name)
            got = torch.autograd.grad(out, (q, k, v), g)
        right = torch.autograd.grad(want, exact, g.double(), retain_graph=True)
        for mine, its in zip(got, right, strict=True):
            assert float((mine - its).abs().max() / its.abs().max()) < 0.03
