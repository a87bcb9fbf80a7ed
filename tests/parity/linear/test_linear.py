"""The kernels of linear attention against the n×n formula in float64, forward and backward:
interpreted on a CPU (TRITON_INTERPRET=1), or on a GPU (--device cuda)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from regard import RegardError, linear, masks
from regard.linear.features import as_it_is
from regard.linear.kernel import mixed
from regard.linear.order import Order
from tests.parity import cases
from tests.parity.agreement import Named, assert_as_exact, errors

pytestmark = pytest.mark.interpreted

MAPS: dict[str, Any] = {
    "elu": linear.elu_plus_one,
    "relu": torch.relu,
    "random": linear.random_features(8, 24, seed=2),
    "own": lambda x: x.square(),
}


class Sizes(NamedTuple):
    """Batch entries, query and key heads, queries, keys, and both widths."""

    B: int = 2
    H: int = 2
    G: int = 1
    Q: int = 43
    K: int = 43
    D: int = 8
    E: int = 5


def draw(s: Sizes, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q, k, v and the gradients of output and total, as numbers of a precision."""
    source = torch.Generator().manual_seed(seed)
    shapes = [
        (s.B, s.H, s.Q, s.D), (s.B, s.G, s.K, s.D), (s.B, s.G, s.K, s.E),
        (s.B, s.H, s.Q, s.E), (s.B, s.H, s.Q, 1),
    ]  # fmt: skip
    numbers = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype).to(cases.DEVICE) for t in numbers]


def by_pairs(tensors: list[Tensor], features: Any, order: Order) -> Named:
    """The formula with all pairs at once, every operation in the precision of the tensors."""
    q, k, v, g, g_total = (t.detach().requires_grad_(i < 3) for i, t in enumerate(tensors))
    group = q.shape[1] // k.shape[1]
    seen = order.seen(k.shape[2], k.device)
    keys, values = (t if seen is None else torch.where(seen, t, 0.0) for t in (k, v))
    a, b = (features(t) for t in (q, keys.repeat_interleave(group, 1)))
    products = a @ b.mT
    if seen is not None:
        products = torch.where(seen.mT, products, 0.0)
    products = products.tril() if order.causal else products
    if order.ids is not None:
        ids = order.ids.to(q.device)[:, None]
        products = torch.where(ids[..., None] == ids[..., None, :], products, 0.0)
    total = products.sum(-1, keepdim=True)
    empty = total == 0
    out = products @ values.repeat_interleave(group, 1) / torch.where(empty, 1.0, total)
    return named((out, total), (q, k, v), (g, g_total))


def named(answers: Any, inputs: Any, pulls: Any) -> Named:
    pulls = [pull.to(answer.dtype) for pull, answer in zip(pulls, answers, strict=True)]
    grads = torch.autograd.grad(answers, inputs, pulls, materialize_grads=True)
    found = dict(zip(("out", "total", "q", "k", "v"), (*answers, *grads), strict=True))
    return {name: t.detach().cpu() for name, t in found.items()}


def by_kernels(tensors: list[Tensor], features: Any, order: Order) -> Named:
    q, k, v, g, g_total = (t.detach().requires_grad_(i < 3) for i, t in enumerate(tensors))
    found = mixed(q, k, v, features, order, 64, backend="triton")
    return named(tuple(found), (q, k, v), (g, g_total))


def assert_right(s: Sizes, dtype: torch.dtype, features: Any, order: Order) -> None:
    tensors = draw(s, dtype)
    if isinstance(features, linear.RandomFeatures):
        # Their sums are told up to a factor.
        tensors[4].zero_()
    truth = by_pairs([t.double() for t in tensors], features, order)
    got = by_kernels(tensors, features, order)
    assert {name: t.dtype for name, t in got.items()} == {
        name: torch.float32 if name == "total" else dtype for name in got
    }
    plain = []
    for seed in range(3):
        drawn = draw(s, dtype, seed)
        exact = by_pairs([t.double() for t in drawn], features, order)
        plain.append(errors(by_pairs(drawn, features, order), exact))
    if isinstance(features, linear.RandomFeatures):
        del got["total"], truth["total"]
    assert_as_exact(got, truth, plain)


ORDERS = {
    "all": Order(),
    "causal": Order(causal=True),
    "padded": Order(lengths=torch.tensor([17, 43])),
    "both": Order(causal=True, lengths=torch.tensor([17, 0])),
}


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments so short that each case has several, and blocks so narrow that it has two."""
    from regard.backends.triton.linear import passes
    from regard.backends.triton.linear.tiles import tiles_for

    monkeypatch.setattr(passes, "segment_of", lambda *_: 32)
    monkeypatch.setattr(
        passes, "tiles_for", lambda q, v: tiles_for(q, v)._replace(rows=16, columns=16)
    )


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("features", "dtype", "D", "E"),
    [
        ("elu", torch.float32, 8, 5),
        ("elu", torch.bfloat16, 20, 33),
        ("relu", torch.float16, 16, 17),
        ("random", torch.float32, 8, 16),
        ("own", torch.float32, 33, 3),
    ],
    ids=["elu", "bfloat16", "float16", "random", "own"],
)
def test_kernels(order: str, features: str, dtype: torch.dtype, D: int, E: int) -> None:
    torch.manual_seed(0)
    assert_right(Sizes(D=D, E=E), dtype, MAPS[features], ORDERS[order])


DOCUMENTS = torch.tensor([[5, 20, 45, 5], [1, 31, 32, 11], [1, 39, 34, 1]])
"""Lengths of documents, in tiles of 16 and segments of 32: over a whole segment, ending with one,
and beginning in the second and going on in the third."""


def ids_of(lengths: Tensor) -> Tensor:
    return torch.stack([torch.arange(len(row)).repeat_interleave(row) for row in lengths])


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(
    ("dtype", "D", "E", "lengths"),
    [(torch.float32, 8, 17, None), (torch.bfloat16, 20, 5, torch.tensor([70, 33, 60]))],
    ids=["float32", "bfloat16, padded"],
)
def test_sums_start_anew_with_documents(
    dtype: torch.dtype, D: int, E: int, lengths: Tensor | None
) -> None:
    order = Order(causal=True, lengths=lengths, ids=ids_of(DOCUMENTS))
    assert_right(Sizes(B=3, Q=75, K=75, D=D, E=E), dtype, MAPS["elu"], order)


@pytest.mark.usefixtures("short_segments")
def test_documents_keep_nan_to_themselves() -> None:
    tensors = draw(Sizes(B=1, Q=75, K=75), torch.float32)
    order = Order(causal=True, ids=ids_of(DOCUMENTS[:1]))
    right = by_kernels(tensors, linear.elu_plus_one, order)
    tensors[1][:, :, 30] = torch.nan
    found = by_kernels(tensors, linear.elu_plus_one, order)
    assert found["out"][:, :, 30:70].isnan().all()
    # Within a tile of 16 a NaN times 0 is NaN.
    apart = [*range(16), *range(70, 75)]
    for name, t in right.items():
        assert torch.equal(found[name][:, :, apart], t[:, :, apart]), name


def test_other_lengths_and_whole_tiles() -> None:
    """Fewer queries than keys; and tiles and segments of the size that calls run with."""
    assert_right(Sizes(B=1, Q=9, K=70), torch.float32, MAPS["elu"], Order())
    assert_right(Sizes(1, 1, 1, 150, 150, 64, 64), torch.bfloat16, MAPS["elu"], Order(causal=True))


@pytest.mark.usefixtures("short_segments")
def test_what_is_hidden_does_no_harm() -> None:
    """NaN in padding reaches nobody, and gets no gradient; memory is read by its strides."""
    order = ORDERS["both"]._replace(lengths=torch.tensor([17, 40]))
    tensors = draw(Sizes(), torch.float32)
    right = by_kernels(tensors, linear.elu_plus_one, order)
    for b, length in enumerate((17, 40)):
        tensors[1][b, :, length:], tensors[2][b, :, length:] = torch.nan, torch.inf
    apart = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    apart[2] = torch.stack([apart[2], apart[2]], -1)[..., 0]
    found = by_kernels(apart, linear.elu_plus_one, order)
    assert all(torch.equal(found[name], t) for name, t in right.items())


@pytest.mark.usefixtures("short_segments")
def test_nan_stays_behind_what_came_before() -> None:
    q, k, v, *_ = draw(Sizes(), torch.float32)
    right = mixed(q, k, v, torch.relu, Order(causal=True), 64, backend="triton").out
    k[:, :, 20, 0] = torch.nan
    found = mixed(q, k, v, torch.relu, Order(causal=True), 64, backend="triton").out
    assert torch.equal(found[:, :, :20], right[:, :, :20])
    assert found[:, :, 20:].isnan().all()


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("documents", [None, (21, 22), (9, 26, 8)], ids=["one", "two", "three"])
def test_a_state_is_carried_on_and_learned(documents: tuple[int, ...] | None) -> None:
    """With documents, one that goes on in the second part, or one that begins with it."""
    tensors = draw(Sizes(), torch.float32)
    ids = torch.arange(len(documents or (43,))).repeat_interleave(torch.tensor(documents or (43,)))
    grads = []
    for backend in ("triton", "tiled"):
        q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
        state, outs = linear.State(), []
        for part in (slice(0, 21), slice(21, 43)):
            here = (t[:, :, part] for t in (q, k, v))
            mask = masks.causal()
            if documents is not None:
                mask = mask & masks.documents(ids[part].to(q.device))
            outs.append(linear.attention(*here, mask=mask, state=state, backend=backend))
        loss = (torch.cat(outs, 2) * tensors[3]).sum() + state.sums.square().sum() / 100
        grads.append((torch.cat(outs, 2), state.sums, *torch.autograd.grad(loss, (q, k, v))))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_second_and_batched_gradients_are_those_of_plain_operations() -> None:
    tensors = draw(Sizes(B=1, Q=20, K=20), torch.float32)
    found = []
    for backend in ("triton", "tiled"):
        q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
        out = linear.attention(q, k, v, mask=masks.causal(), backend=backend)
        pulls = torch.stack([tensors[3], tensors[3] ** 2])
        many = torch.autograd.grad(out, k, pulls, retain_graph=True, is_grads_batched=True)[0]
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        found.append((many, *torch.autograd.grad(first.square().sum(), (q, k, v))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_trace_has_the_kernels_output() -> None:
    q, k, v, *_ = draw(Sizes(B=1), torch.float32)
    ours, plain = (
        linear.trace(q, k, v, mask=masks.causal(), backend=backend)
        for backend in ("triton", "tiled")
    )
    torch.testing.assert_close(ours.out, plain.out)
    torch.testing.assert_close(ours.lse, plain.lse)
    torch.testing.assert_close(ours.received(), plain.received())


def test_what_cannot_run_is_refused() -> None:
    q, k, v, *_ = draw(Sizes(), torch.float32)
    documents = masks.documents(torch.arange(43, device=q.device) // 9)
    with pytest.raises(RegardError, match="within documents its sums run in one direction"):
        linear.attention(q, k, v, mask=documents, backend="triton")
    with pytest.raises(RegardError, match="compute in float32"):
        linear.attention(q.double(), k.double(), v.double(), backend="triton")
    wide = torch.ones(1, 1, 4, 300, device=q.device)
    with pytest.raises(RegardError, match="up to 256 wide"):
        linear.attention(wide, wide, wide, backend="triton")
    with pytest.raises(RegardError, match="'triton', 'tiled' or None"):
        linear.attention(q, k, v, backend="flex")
    empty = mixed(q[:, :, :0], k, v, as_it_is, Order(), 64).out
    assert empty.shape == (2, 2, 0, 5)
