"""What cuDNN is given: layouts that do not change from call to call, and plans of our own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
    st.integers(0, 3), st.sampled_from([None, 0, 1]), st.integers(2, 5), st.sampled_from(ORDERS),
    st.integers(0, 3),
)  # fmt: skip
def test_rows_are_laid_out_like_the_queries(
    shape: tuple[int, ...], order: tuple[int, ...], wider: int, expanded: int | None, width: int,
    other: tuple[int, ...], longer: int,
) -> None:  # fmt: skip
    q = laid_out(shape, order, wider)
    if expanded is not None:
        q = q.narrow(expanded, 0, 1).expand(shape)
    t = laid_out((*shape[:3], width), other, longer)
    found = cudnn_plans.like_queries(t, q)
    assert torch.equal(found, t)
    # As PyTorch allocates an output, at least where it has the shape of the queries.
    if width == shape[3]:
        for n, mine, its in zip(t.shape, found.stride(), torch.empty_like(q).stride(), strict=True):
            assert n == 1 or mine == its
    assert found.stride(-1) == 1
    assert cudnn_plans.lies_like_queries(found, q)
    assert cudnn_plans.like_queries(found, q) is found


@pytest.mark.parametrize("order", ORDERS)
def test_other_widths_keep_the_order(order: tuple[int, ...]) -> None:
    found = cudnn_plans.like_queries(torch.randn(2, 3, 5, 4), laid_out((2, 3, 5, 8), order))
    assert found.stride() == laid_out((2, 3, 5, 4), order).stride()


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 0.9, 1e-6])
def test_calls_are_marked_as_ours(dropout: float) -> None:
    """By another share of dropped weights, of the same weights: PyTorch compares the bits, those
    of float32 in the backward pass."""
    marked = cudnn_plans._marked(dropout)
    assert marked == pytest.approx(dropout, rel=1e-6)
    given, ours = (torch.tensor(p, dtype=torch.float32) for p in (dropout, marked))
    assert given.view(torch.int32) != ours.view(torch.int32)


GRADIENTS = {
    "dense": lambda: laid_out((2, 3, 5, 8), (0, 1, 2, 3)),
    "turned": lambda: laid_out((2, 3, 5, 8), (0, 2, 1, 3)),
    "longer rows": lambda: laid_out((2, 3, 5, 8), (0, 1, 2, 3), 8),
    "one for all": lambda: torch.ones(()).expand(2, 3, 5, 8),
    "an odd address": lambda: torch.randn(241)[1:].view(2, 5, 3, 8).transpose(1, 2),
    "zeros without memory": lambda: torch._efficientzerotensor(2, 3, 5, 8),
}


def attended(q: Tensor) -> Tensor:
    """By PyTorch's CPU operator, which has a node of the same kind."""
    found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0]
    return found


def seen_by(out: Tensor) -> list[Tensor]:
    """What a node is given, from here on."""
    seen: list[Tensor] = []
    assert out.grad_fn is not None
    out.grad_fn.register_prehook(lambda given: seen.append(given[0]))
    return seen


@pytest.mark.parametrize("how", GRADIENTS)
def test_gradients_arrive_as_the_output_lies(how: str) -> None:
    q = laid_out((2, 3, 5, 8), (0, 2, 1, 3)).requires_grad_()
    out, g = attended(q), GRADIENTS[how]()
    want = torch.autograd.grad(out, q, g, retain_graph=True)[0]
    cudnn_plans.lay_gradients_like(out)
    seen = seen_by(out)
    assert torch.allclose(torch.autograd.grad(out, q, g)[0], want)
    assert torch.equal(seen[0], g)
    assert seen[0].stride() == out.stride()
    assert seen[0].data_ptr() % 16 == 0


class Strides(TorchDispatchMode):
    """The strides of gradients that an operator is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "flash_attention_for_cpu_backward" in str(func):
            self.seen.append(args[0].stride())
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", [True, False], ids=["vmap", "is_grads_batched"])
@pytest.mark.parametrize("order", ORDERS[:2])
def test_many_gradients_are_laid_out_one_by_one(order: tuple[int, ...], transform: bool) -> None:
    q = laid_out((2, 3, 5, 8), order).requires_grad_()
    out, many = attended(q), torch.randn(4, 2, 3, 5, 8)
    want = [torch.autograd.grad(out, q, g, retain_graph=True)[0] for g in many]
    cudnn_plans.lay_gradients_like(out)
    with Strides() as strides:
        if transform:
            got = torch.func.vmap(lambda g: torch.autograd.grad(out, q, g, retain_graph=True)[0])(
                many
            )
        else:
            (got,) = torch.autograd.grad(out, q, many, is_grads_batched=True)
    assert torch.allclose(got, torch.stack(want))
    assert strides.seen == [out.stride()] * 4


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The shares of dropped weights of calls that cuDNN is given, by PyTorch's choice."""
    shares: list[float] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: Any, scale: float) -> tuple[Any, ...]:
        shares.append(more[2])
        found: tuple[Any, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=more[3], scale=scale
        )
        return found

    monkeypatch.setattr(cudnn_plans, "_attend", attend)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: cudnn_plans._CUDNN)
    return shares


def learn(q: Tensor) -> Tensor | None:
    return cudnn_plans.attend_to_learn(q, q, q, None, 0.0, False, 0.3, grouped=False)


def test_what_learns_is_marked_and_its_gradients_laid_out(taken: list[float]) -> None:
    q = laid_out((2, 3, 5, 8), (0, 2, 1, 3)).requires_grad_()
    out = learn(q)
    assert out is not None
    assert math.copysign(1.0, taken[0]) == -1.0
    seen = seen_by(out)
    g = torch.randn(2, 3, 5, 8)
    torch.autograd.grad(out, q, g)
    assert seen[0].stride() == out.stride() != g.stride()


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
@pytest.mark.parametrize(
    "why", ["another choice", "replaced", "observed", "traced", "expanded", "unknown"]
)
def test_calls_that_are_left_to_pytorch(
    why: str, taken: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.randn(2, 3, 5, 8, requires_grad=True)
    if why == "another choice":
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: 1)
    if why == "replaced":
        functional = torch.nn.functional
        monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *_, **__: q)
    if why == "observed":
        with Strides():
            assert learn(q) is None
    elif why == "traced":
        found: list[Tensor | None] = []
        torch.jit.trace(lambda q: (found.append(learn(q)), q * 2)[1], q, check_trace=False)
        assert found[0] is None
    elif why == "expanded":
        assert learn(q[:1].expand(2, 3, 5, 8)) is None
    else:
        if why == "unknown":
            monkeypatch.setattr(cudnn_plans, "knows_backward", lambda: False)
        assert learn(q) is None
    assert not taken


@pytest.mark.parametrize("order", ORDERS[:2])
def test_a_backward_pass_gets_both_as_the_queries_lie(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    packet = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    monkeypatch.setattr(packet, "default", lambda *a, **_: given.extend(a) or a[1:4])
    q = laid_out((2, 3, 5, 8), order)
    out, g = laid_out(q.shape, ORDERS[2]), laid_out(q.shape, ORDERS[0], 8)
    nothing = torch.zeros(())
    cudnn_plans.pull(g, q, q, q, out, out[..., :1], 0.3, True, nothing)
    assert torch.equal(given[0], g)
    assert torch.equal(given[4], out)
    assert given[0].stride() == given[4].stride() == q.stride()
    assert math.copysign(1.0, given[13]) == -1.0


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
