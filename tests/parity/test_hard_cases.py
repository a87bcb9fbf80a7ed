"""Calls that break attention elsewhere: nothing to see, poison in hidden places, odd memory.

Each backend that accepts a case is held to float64 by what plain arithmetic of the case's precision
errs, or to itself on a case that must be the same. Triton's kernels are held in a process of their
own, interpreted; on a GPU (--device cuda) all are held in one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard
from regard import RegardError, biases, masks, scores
from regard.backends.contract import Backend, Rows
from regard.backends.reference import Reference, ReferencePass
from regard.backends.sdpa import Sdpa
from regard.backends.tiled import Tiled, TiledPass
from regard.backends.triton import Triton
from regard.inputs import AttentionInputs, check
from tests.parity import cases
from tests.parity.agreement import Named, assert_as_exact, errors
from tests.parity.cases import DEFAULTS, observed, plain

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Reference(), Tiled(), Sdpa(), Triton())
}
TRITON = pytest.param("triton", marks=pytest.mark.interpreted)
FROM_LOGITS = (
    "entropy", "received", "top", "weights", "mass", "mass, not learned", "map mean", "map sum",
    "map max", "gradient 0", "gradient 1",
)  # fmt: skip
LOW = (torch.float32, torch.bfloat16, torch.float16)

SDPA = pytest.param(
    "sdpa",
    marks=pytest.mark.skipif(
        cases.DEVICE != "cpu", reason="on CUDA it refuses most of these, and hidden NaN can leak"
    ),
)
every_backend = pytest.mark.parametrize("backend", ["reference", "tiled", SDPA, TRITON])
every_tracer = pytest.mark.parametrize("backend", ["reference", "tiled", TRITON])
# Kernels know no float64 and no empty tensors.
every_plain_tracer = pytest.mark.parametrize("backend", ["reference", "tiled"])


def second_pass(backend: str) -> Any:
    """Who answers questions about a backend's traces; PyTorch's kernels leave none."""
    if backend == "triton":
        from regard.backends.triton.questions.second_pass import TritonPass

        return TritonPass()
    return {"reference": ReferencePass(), "tiled": TiledPass(), "sdpa": None}[backend]


def leave_to_a_gpu(backend: str) -> None:
    if backend == "triton" and cases.DEVICE == "cpu":
        pytest.skip("Triton's interpreter is slow, and other cases tell as much")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(*shape, generator=source, dtype=torch.float64).to(cases.DEVICE, dtype)


def qkv(
    B: int = 2,
    H: int = 2,
    G: int = 2,
    Q: int = 7,
    K: int = 7,
    D: int = 4,
    E: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        numbers(B, H, Q, D, seed=seed, dtype=dtype),
        numbers(B, G, K, D, seed=seed + 1, dtype=dtype),
        numbers(B, G, K, D if E is None else E, seed=seed + 2, dtype=dtype),
    )


def learned(*tensors: Tensor) -> list[Tensor]:
    """Leaves with the same memory layout."""
    return [t.detach().requires_grad_() for t in tensors]


def checked(tensors: list[Tensor], **options: Any) -> AttentionInputs:
    torch.manual_seed(5)
    return check(*tensors, **(DEFAULTS | options))


def answers(backend: str, *tensors: Tensor, **options: Any) -> Named:
    """Everything a backend can be asked, gradients included."""
    run, second = BACKENDS[backend], second_pass(backend)
    leaves = learned(*tensors)
    inputs = checked(leaves, **options)
    assert run.refuses(inputs, statistics=second is not None) == []
    return observed(run, inputs, leaves, second)


def hold(
    backend: str,
    *tensors: Tensor,
    low: torch.dtype | None = None,
    one_key: bool = False,
    without: tuple[str, ...] = (),
    **options: Any,
) -> Named:
    """Hold a backend to float64 by the error of plain arithmetic in the inputs' own precision.

    A sum of few numbers can come out right by luck, so before a result is called wrong the plain
    errors of more draws of the same size are taken into account. Where all weight is on `one_key`,
    gradients of q and k are 0 as differences of equal numbers, and weights are 1 as exp of such,
    which plain arithmetic happens to meet; what is missed must be below the rounding of those
    numbers.
    """
    full = answers(backend, *tensors, **options)
    cancelled = ("gradient 0", "gradient 1") if one_key and backend == "sdpa" else ()
    exponents = FROM_LOGITS if one_key and backend == "triton" else ()
    without += cancelled + exponents
    got = {name: value for name, value in full.items() if name not in without}
    dtype = low or tensors[0].dtype
    second = None if backend == "sdpa" else ReferencePass()

    def reference(tensors: Sequence[Tensor], dtype: torch.dtype) -> Named:
        leaves = learned(*(t.to(dtype) for t in tensors))
        inputs = checked(leaves, **options)
        inputs = inputs if dtype == torch.float64 else plain(inputs)
        return observed(Reference(), inputs, leaves, second)

    def some(every: Named) -> Named:
        return {name: value for name, value in every.items() if name not in without}

    every = reference(tensors, torch.float64)
    for name in cancelled:
        assert full[name].abs().max() <= _cancelling(*tensors)
    for name in exponents:
        # To units of log 2, to lse, and back: each rounds a logit. Sums are over all rows.
        largest = float(every["max_logit"].nan_to_num(neginf=0).abs().max())
        rounding = 4 * torch.finfo(torch.float32).eps * max(largest, 1)
        allowed = (
            tensors[0].shape[2] * math.expm1(rounding) * max(float(every[name].abs().max()), 1)
        )
        assert (full[name] - every[name]).abs().max() <= allowed, name
    truth = some(every)
    found = [errors(some(reference(tensors, dtype)), truth)]
    try:
        assert_as_exact(got, truth, found)
    except AssertionError:
        for seed in range(50, 54):
            like = [
                (t.double().std() * numbers(*t.shape, seed=seed + i)).to(t.dtype)
                for i, t in enumerate(tensors)
            ]
            rough, exact = reference(like, dtype), reference(like, torch.float64)
            found.append(errors(some(rough), some(exact)))
        assert_as_exact(got, truth, found)
    return full


def _cancelling(q: Tensor, k: Tensor, v: Tensor) -> float:
    """The rounding of Σ (g·v - g·out) k: E products, twice, each rounded, over all pairs of a row;
    no cotangent g of these tests is above 5."""
    n, E = max(q.shape[2], k.shape[2]), v.shape[-1]
    largest = float(max(q.abs().max(), k.abs().max()) * v.abs().max()) * 5
    return 2 * E * E * n * largest * q.shape[-1] ** -0.5 * torch.finfo(q.dtype).eps


def assert_same(got: Named, wanted: Named, *, rounded: float | None = None) -> None:
    """Equal but for the order of sums; or for weights that were `rounded` for a product, or not."""
    assert got.keys() == wanted.keys()
    within = {} if rounded is None else {"rtol": rounded, "atol": rounded}
    for name in got:
        torch.testing.assert_close(
            got[name], wanted[name], equal_nan=True, msg=lambda m, n=name: n + m, **within
        )


@every_backend
@pytest.mark.parametrize("n", [1, 2, 63, 111, 129, 1000])
@pytest.mark.parametrize(
    "mask", [None, masks.causal(), masks.causal() & masks.window(50)], ids=repr
)
def test_odd_lengths(backend: str, n: int, mask: masks.Mask | None) -> None:
    if backend == "sdpa" and n == 1000 and repr(mask) == "causal() & window(50)":
        with pytest.raises(RegardError, match="it would write the mask out as an n×n tensor"):
            regard.attention(*qkv(B=1, Q=n, K=n), mask=mask, backend=backend)
        return
    if n in (111, 1000):
        leave_to_a_gpu(backend)
    # Means over many mostly hidden pairs, summed in another order, err by more than few do.
    without = ("map mean",) if n == 1000 else ()
    hold(backend, *qkv(B=1, Q=n, K=n), mask=mask, one_key=n == 1, without=without)


@every_backend
@pytest.mark.parametrize(("Q", "K"), [(1, 9), (3, 8), (8, 3), (9, 1)])
@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.causal(offset=0), ~masks.causal()], ids=repr
)
def test_queries_shorter_and_longer_than_keys(
    backend: str, Q: int, K: int, mask: masks.Mask
) -> None:
    one_key = int(mask.dense(Q, K).sum(-1).max()) <= 1
    hold(backend, *qkv(Q=Q, K=K), mask=mask, one_key=one_key)


EMPTY = {
    "one-row": masks.keep(torch.arange(7)[:, None] != torch.tensor([3] * 7)),
    "no-length": masks.padding([0, 5]),
    "before-the-keys": masks.causal(offset=-3),
    "nothing": ~masks.window(None, None),
}


@every_backend
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("mask", EMPTY.values(), ids=EMPTY)
def test_rows_that_see_nothing(backend: str, mask: masks.Mask, dtype: torch.dtype) -> None:
    tensors = qkv(dtype=dtype)
    allowed = mask.dense(7).expand(2, 2, 7, 7)
    empty = ~allowed.any(-1)
    assert empty.any()
    got = hold(backend, *tensors, mask=mask)
    assert not got["out"][empty].any()
    for name in ("gradient 0", "gradient 1", "gradient 2"):
        assert got[name].isfinite().all()
    assert not got["gradient 0"][empty].any()
    if backend != "sdpa":
        assert (got["lse"][empty] == -math.inf).all()
        assert (got["max_logit"][empty] == -math.inf).all()
        assert (got["mean_logit"][empty] == -math.inf).all()
        assert not got["entropy"][empty].any()
        assert not got["top"][empty].any()
        assert not got["mass"][empty].any()


@every_tracer
def test_a_row_that_sees_nothing_gives_all_to_the_sink(backend: str) -> None:
    sink = torch.tensor([0.5, -2.0], device=cases.DEVICE)
    got = hold(backend, *qkv(), mask=masks.padding([0, 5]), sink=sink)
    assert not got["out"][0].any()
    assert not got["entropy"][0].any()
    assert torch.equal(got["lse"][0], sink.cpu()[:, None].expand(2, 7))
    assert (got["max_logit"][0] == -math.inf).all()
    assert not got["received"][0].any()


@every_tracer
def test_a_sink_learns_from_rows_that_see_nothing(backend: str) -> None:
    q, k, v = qkv()
    sink = torch.tensor([0.5, -2.0], device=cases.DEVICE, requires_grad=True)
    t = regard.trace(q, k, v, mask=masks.padding([0, 0]), sink=sink, backend=backend)
    (t.lse.sum() + t.out.sum() + t.entropy.sum()).backward()
    torch.testing.assert_close(sink.grad, torch.full_like(sink, 2.0 * 7))


POISONS = {"nan": math.nan, "inf": math.inf, "minus-inf": -math.inf}


def poisoned(t: Tensor, places: Tensor, poison: float) -> Tensor:
    """Poison in every other number of some keys [B, K], so that plain numbers stand beside it."""
    t = t.clone()
    here = places[:, None, :, None] & (torch.arange(t.shape[-1]) % 2 == 0)
    return t.masked_fill(here.to(t.device), poison)


HIDDEN = {
    "padding": (masks.padding([4, 7]), torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0] * 7]).bool()),
    "future": (masks.causal(offset=-2), torch.tensor([[0, 0, 0, 0, 0, 1, 1]] * 2).bool()),
    "per-row": (
        masks.keep((torch.rand(2, 2, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.6)
        & (torch.arange(7) != 2)),
        torch.tensor([[0, 0, 1, 0, 0, 0, 0]] * 2).bool(),
    ),
}  # fmt: skip


@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("where", HIDDEN)
def test_poison_in_hidden_keys_and_values_never_leaks(
    backend: str, where: str, poison: float, dtype: torch.dtype
) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("its kernels compute in float32")
    # Interpreted, precisions take turns so that any two of the three kinds meet.
    turn = list(HIDDEN).index(where) + list(POISONS.values()).index(poison)
    if dtype != (torch.float32, torch.bfloat16)[turn % 2]:
        leave_to_a_gpu(backend)
    mask, places = HIDDEN[where]
    q, k, v = qkv(dtype=dtype)
    clean = answers(backend, q, k, v, mask=mask)
    assert clean["out"].isfinite().all()
    spoiled = answers(
        backend, q, poisoned(k, places, poison), poisoned(v, places, poison), mask=mask
    )
    hidden = places[:, None, :, None].expand(k.shape)
    for name in ("gradient 1", "gradient 2"):
        assert not clean[name][hidden].any()
        assert not spoiled[name][hidden].any()
    # What is spoiled may be computed in float32 where the CPU multiplies bfloat16 as it is.
    narrow = backend == "tiled" and dtype == torch.bfloat16
    assert_same(spoiled, clean, rounded=2**-6 if narrow else None)


@every_backend
@pytest.mark.parametrize(
    ("part", "poison"),
    [("key", math.nan), ("value", math.nan), ("value", math.inf), ("value", -math.inf)],
)
def test_poison_shows_in_just_the_rows_that_see_it(backend: str, part: str, poison: float) -> None:
    q, k, v = qkv()
    places = torch.zeros(2, 7, dtype=torch.bool)
    places[0, 4] = True
    mask = masks.causal()
    clean = answers(backend, q, k, v, mask=mask)["out"]
    bad_k, bad_v = poisoned(k, places, poison), poisoned(v, places, poison)
    leaves = learned(q, bad_k if part == "key" else k, bad_v if part == "value" else v)
    out = BACKENDS[backend].attend(checked(leaves, mask=mask)).cpu()
    torch.testing.assert_close(out[1], clean[1])
    torch.testing.assert_close(out[0, :, :4], clean[0, :, :4])
    sees = out[0, :, 4:].detach()
    if part == "key":
        assert sees.isnan().all()
    else:
        # Even columns hold the poison itself; odd ones stay what they are.
        assert torch.equal(
            sees[..., ::2].nan_to_num(7.0), torch.full_like(sees[..., ::2], poison).nan_to_num(7.0)
        )
        torch.testing.assert_close(sees[..., 1::2], clean[0, :, 4:, 1::2])


@every_backend
def test_rows_that_do_not_see_poison_have_clean_gradients(backend: str) -> None:
    q, k, v = qkv()
    places = torch.zeros(2, 7, dtype=torch.bool)
    places[0, 4] = True

    def gradient(k: Tensor, v: Tensor) -> Tensor:
        leaves = learned(q, k, v)
        out = BACKENDS[backend].attend(checked(leaves, mask=masks.causal()))
        torch.cat([out[0, :, :4].flatten(), out[1].flatten()]).square().sum().backward()
        assert leaves[0].grad is not None
        return torch.cat([leaves[0].grad[0, :, :4].flatten(), leaves[0].grad[1].flatten()])

    torch.testing.assert_close(
        gradient(poisoned(k, places, math.nan), poisoned(v, places, math.nan)), gradient(k, v)
    )


@every_backend
def test_visible_poison_shows_without_a_mask(backend: str) -> None:
    q, k, v = qkv()
    k[0, 0, 3, 1] = math.nan
    out = regard.attention(q, k, v, backend=backend)
    assert out[0, 0].isnan().all()
    assert out[0, 1].isfinite().all()
    assert out[1].isfinite().all()


@every_tracer
def test_poison_in_hidden_places_never_reaches_the_questions(backend: str) -> None:
    q, k, v = qkv()
    mask, places = HIDDEN["padding"]
    clean = regard.trace(q, k, v, mask=mask, backend=backend)
    spoiled = regard.trace(q, poisoned(k, places, math.nan), v, mask=mask, backend=backend)
    for ask in (
        lambda t: t.weights(),
        lambda t: t.weights(queries=[2], keys=[1, 6]),
        lambda t: t.mass([0, 5]),
        lambda t: t.received(),
        lambda t: t.map(3),
        lambda t: t.top(3).values,
        lambda t: t.mean_logit,
    ):
        torch.testing.assert_close(ask(spoiled), ask(clean))


@every_backend
@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_heads_equal_repeated_heads(backend: str, groups: int) -> None:
    q, k, v = qkv(H=4, G=groups)
    apart = [t.repeat_interleave(4 // groups, dim=1) for t in (k, v)]
    mask = masks.causal()
    got = hold(backend, q, k, v, mask=mask)
    wanted = answers(backend, q, *apart, mask=mask)
    for name in ("gradient 1", "gradient 2"):
        wanted[name] = wanted[name].unflatten(1, (groups, -1)).sum(2)
    assert_same(got, wanted)


@every_tracer
@pytest.mark.parametrize("E", [1, 3, 9])
def test_values_of_another_width(backend: str, E: int) -> None:
    got = hold(backend, *qkv(E=E), mask=masks.causal())
    assert got["out"].shape == (2, 2, 7, E)


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _strided(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, dim=-1)[..., ::2]


def _expanded(t: Tensor) -> Tensor:
    return t[:1].expand(3, -1, -1, -1)


def _reversed_memory(t: Tensor) -> Tensor:
    return t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


@every_backend
@pytest.mark.parametrize("lay", [_transposed, _strided, _expanded, _reversed_memory])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.padding([4])], ids=repr)
def test_memory_layouts(
    backend: str, lay: Callable[[Tensor], Tensor], mask: masks.Mask | None
) -> None:
    if mask != masks.causal() or lay in (_transposed, _expanded):
        leave_to_a_gpu(backend)
    tensors = [lay(t) for t in qkv()]
    assert not any(t.is_contiguous() for t in tensors)
    got = answers(backend, *tensors, mask=mask)
    assert_same(got, answers(backend, *(t.contiguous() for t in tensors), mask=mask))


@every_backend
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=repr)
def test_huge_logits(backend: str, dtype: torch.dtype, mask: masks.Mask | None) -> None:
    """Numbers near 300 give logits of 10^5, past what float16 holds: scores must be float32."""
    q, k, v = qkv(Q=9, K=9)
    q, k, v = (300 * q).to(dtype), (300 * k).to(dtype), v.to(dtype)
    got = hold(backend, q, k, v, mask=mask, low=torch.float32, one_key=True)
    assert got["out"].isfinite().all()
    if backend != "sdpa":
        assert got["max_logit"].max() > 65504


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_and_nothing_more(backend: str, dtype: torch.dtype) -> None:
    tensors = qkv()
    run = BACKENDS[backend]

    def rows(tensors: Sequence[Tensor], *, autocast: bool) -> Named:
        leaves = learned(*tensors)
        with torch.autocast(cases.DEVICE, dtype=dtype, enabled=autocast):
            inputs = checked(leaves, mask=masks.causal())
            found = {"out": run.attend(inputs)}
            found |= run.observe(inputs)._asdict() if run.observes else {}
        found["out"].square().sum().backward()
        return found | {f"gradient {i}": t.grad.to(dtype) for i, t in enumerate(leaves)}

    cast = rows([t.to(dtype) for t in tensors], autocast=False)
    got = rows(tensors, autocast=True)
    assert got["out"].dtype == dtype
    for name, value in got.items():
        assert torch.equal(value, cast[name]), name


@every_plain_tracer
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=repr)
@pytest.mark.parametrize(
    "sizes",
    [{"Q": 0}, {"K": 0}, {"Q": 0, "K": 0}, {"B": 0}, {"E": 0}, {"H": 0, "G": 0}],
    ids=str,
)
def test_nothing_at_all(backend: str, sizes: dict[str, int], mask: masks.Mask | None) -> None:
    q, k, v = learned(*qkv(**sizes))
    t = regard.trace(q, k, v, mask=mask, backend=backend)
    B, H, Q, K = *q.shape[:3], k.shape[2]
    assert t.out.shape == (B, H, Q, v.shape[-1])
    assert not t.out.any()
    if K == 0:
        assert (t.lse == -math.inf).all()
        assert (t.max_logit == -math.inf).all()
        assert not t.entropy.any()
    assert t.received().shape == (B, H, K)
    assert t.weights().shape == (B, H, Q, K)
    assert t.top(2).values.shape == (B, H, Q, min(2, K))
    assert t.map(3).shape == (B, H, min(3, Q), min(3, K))
    assert t.mean_logit.shape == (B, H, Q)
    (t.out.sum() + t.entropy.sum()).backward()
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
        assert tensor.grad.isfinite().all()


def minus_infinity() -> Tensor:
    bias = numbers(1, 2, 7, 7, seed=9)
    bias[0, :, 2, 3:] = -math.inf
    bias[0, 1, 5] = -math.inf
    return bias


@every_backend
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_minus_infinity_in_a_bias_hides(backend: str, dtype: torch.dtype) -> None:
    tensors = qkv(dtype=dtype)
    got = hold(backend, *tensors, bias=biases.dense(minus_infinity().to(dtype)))
    assert not got["out"][:, 1, 5].any()
    for i in range(3):
        assert got[f"gradient {i}"].isfinite().all()
    if backend != "sdpa":
        assert (got["lse"][:, 1, 5] == -math.inf).all()
        assert not got["entropy"][:, 1, 5].any()


@every_tracer
def test_minus_infinity_in_a_bias_has_no_gradient(backend: str) -> None:
    bias = minus_infinity().requires_grad_()
    t = regard.trace(*qkv(), bias=biases.dense(bias), backend=backend)
    (t.out.sum() + t.entropy.sum()).backward()
    assert bias.grad is not None
    assert bias.grad.isfinite().all()
    assert bias.grad.any()
    assert not bias.grad[bias == -math.inf].any()


@every_backend
def test_a_row_that_a_finite_mask_hides_whole_mixes_all(backend: str) -> None:
    """As the formula has it: beside the least number logits are lost, and all are the same."""
    least = torch.finfo(torch.float32).min
    bias = torch.full((7, 7), least, device=cases.DEVICE).triu(1)
    bias[3] = least
    tensors = qkv()
    # Triton's kernels take a number that can be multiplied for the least.
    without = ("lse", "max_logit") if backend == "triton" else ()
    if backend == "sdpa":
        # PyTorch weighs such rows by a log-sum-exp that has lost how many keys there are.
        without = ("gradient 0", "gradient 1", "gradient 2")
    got = hold(backend, *tensors, bias=biases.dense(bias), without=without)
    torch.testing.assert_close(got["out"][:, :, 3], tensors[2].mean(2).cpu())
    if backend != "sdpa":
        t = regard.trace(*tensors, bias=biases.dense(bias), backend=backend)
        assert t.weights(queries=[3]).sub(1 / 7).abs().max() < 1e-6


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_finite_mask_of_a_wider_type(backend: str, dtype: torch.dtype, wide: torch.dtype) -> None:
    """In the type of queries its numbers would be minus infinity, and hide rows whole."""
    leave_to_a_gpu(backend) if wide == torch.float64 else None
    bias = torch.full((7, 7), torch.finfo(wide).min, dtype=wide, device=cases.DEVICE).triu(1)
    bias[3], bias[4] = torch.finfo(torch.float32).min, -math.inf
    q, k, v = qkv(dtype=dtype)
    out = regard.attention(q, k, v, bias=biases.dense(bias), backend=backend).float()
    if backend == "sdpa" and dtype == torch.float16:
        # Its own least number is no more than a logit, beside which others count.
        assert out[:, :, 3].any()
    else:
        torch.testing.assert_close(out[:, :, 3], v.float().mean(2), atol=2e-2, rtol=0)
    assert not out[:, :, 4].any()
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0].float())


@every_tracer
def test_a_table_of_the_least_numbers(backend: str) -> None:
    """What all keys lose alike is lost by none."""
    q, k, v = qkv()
    bias = biases.relative(torch.full((2, 5), torch.finfo(torch.float32).min, device=q.device))
    out = regard.attention(q, k, v, bias=bias, backend=backend)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(v))


@pytest.mark.parametrize("shown", ["first", "last", "none"])
@pytest.mark.parametrize("large", [1.0, 1e32])
def test_a_finite_mask_over_many_tiles(shown: str, large: float) -> None:
    """What was mixed of hidden keys goes when one is met that is seen, and no entropy is NaN."""
    q, k, v = qkv(1, 2, 2, 5, 2100)
    bias = torch.full((5, 2100), torch.finfo(torch.float32).min, device=cases.DEVICE)
    if shown != "none":
        bias[:, slice(0, 40) if shown == "first" else slice(2050, 2060)] = 0.0
        bias[:, 0 if shown == "first" else 2055] = large
    got, want = (
        regard.trace(q, k, v, bias=biases.dense(bias), backend=name)
        for name in ("tiled", "reference")
    )
    for name in ("out", "entropy", "lse"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-5)


@every_plain_tracer
def test_dropout_keeps_the_mean(backend: str) -> None:
    """Over S seeds the mean of each output lies within six of its standard errors.

    One output is Σ p v · keep / (1 - r), whose variance is Σ (p v)² · r / (1 - r).
    """
    share, seeds = 0.3, 300
    q, k, v = qkv(B=1, Q=5, K=9)
    t = regard.trace(q, k, v, backend=backend)
    total = torch.zeros_like(t.out)
    for seed in range(seeds):
        torch.manual_seed(seed)
        total += regard.attention(q, k, v, dropout=share, training=True, backend=backend)
    spread = (t.weights()[..., None] * v[:, :, None]).square().sum(-2) * share / (1 - share)
    assert ((total / seeds - t.out).abs() <= 6 * (spread / seeds).sqrt()).all()


def test_dropout_drops_the_asked_share() -> None:
    """With equal weights and values of 1, a row's output counts what was kept."""
    share, n = 0.3, 200
    zeros, ones = torch.zeros(1, 1, n, 1), torch.ones(1, 1, n, 1)
    torch.manual_seed(2)
    out = regard.attention(zeros, zeros, ones, dropout=share, training=True, backend="tiled")
    kept = (out * (1 - share)).mean()
    assert abs(kept - (1 - share)) <= 6 * math.sqrt(share * (1 - share) / n**2)
    assert len(out.unique()) > 10


def dropped(backend: str, seed: int, **options: Any) -> Named:
    leaves = learned(*qkv())
    torch.manual_seed(seed)
    out = regard.attention(*leaves, dropout=0.4, backend=backend, **options)
    out.square().sum().backward()
    grads = {f"gradient {i}": t.grad for i, t in enumerate(leaves) if t.grad is not None}
    return {"out": out.detach(), **grads}


@every_tracer
def test_one_seed_drops_the_same_pairs_everywhere(backend: str) -> None:
    one = dropped(backend, 3, training=True)
    assert_same(one, dropped("reference", 3, training=True))
    assert not torch.allclose(one["out"], dropped(backend, 4, training=True)["out"])


@every_tracer
def test_dropout_needs_training(backend: str) -> None:
    out = regard.attention(*qkv(), backend=backend)
    assert torch.equal(dropped(backend, 3)["out"], out)
    assert torch.equal(dropped(backend, 3, training=False)["out"], out)
    assert not torch.allclose(dropped(backend, 3, training=True)["out"], out)


@every_tracer
def test_weights_and_statistics_are_before_dropout(backend: str) -> None:
    tensors = qkv()
    calm = regard.trace(*tensors, backend=backend)
    t = regard.trace(*tensors, dropout=0.4, training=True, backend=backend)
    assert not torch.allclose(t.out, calm.out)
    # Alike but for rounding: with dropout another loop may run.
    for name in ("lse", "entropy", "max_logit"):
        torch.testing.assert_close(getattr(t, name), getattr(calm, name))
    torch.testing.assert_close(t.weights().sum(-1), torch.ones_like(t.lse))
    torch.testing.assert_close(t.weights(), calm.weights())
    torch.testing.assert_close(t.received(), calm.received())


@every_plain_tracer
def test_the_first_derivatives_are_those_of_the_numbers(backend: str) -> None:
    q, k, v = learned(*qkv(B=1, H=2, G=1, Q=3, K=4, D=2, E=3, dtype=torch.float64))
    sink, table, cap = numbers(2, dtype=torch.float64), numbers(2, 3, dtype=torch.float64), 2.0
    w = numbers(2, 2, dtype=torch.float64)

    def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, table: Tensor, w: Tensor) -> Any:
        t = regard.trace(
            q, k, v, mask=masks.causal(offset=0), score=scores.general(w), softcap=cap, sink=sink,
            bias=biases.relative(table), backend=backend,
        )  # fmt: skip
        return t.out, t.lse, t.entropy

    assert torch.autograd.gradcheck(call, (q, k, v, *learned(sink, table, w)))


@every_plain_tracer
def test_the_first_derivatives_of_rows_that_see_nothing(backend: str) -> None:
    leaves = learned(*qkv(B=1, Q=3, K=3, D=2, dtype=torch.float64))

    def call(*tensors: Tensor) -> Any:
        t = regard.trace(*tensors, mask=masks.causal(offset=-1), backend=backend)
        return t.out, t.lse[:, :, 1:], t.entropy

    assert torch.autograd.gradcheck(call, leaves)


def test_the_reference_has_second_derivatives() -> None:
    leaves = learned(*qkv(B=1, H=1, G=1, Q=3, K=3, D=2, dtype=torch.float64))

    def call(*tensors: Tensor) -> Any:
        t = regard.trace(*tensors, mask=masks.causal(), softcap=2.0, backend="reference")
        return t.out, t.lse, t.entropy

    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("backend", ["tiled", TRITON])
def test_operators_say_that_they_have_no_second_derivatives(backend: str) -> None:
    q, k, v = learned(*qkv())
    out = regard.attention(q, k, v, backend=backend)
    (slope,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RegardError, match="differentiable once") as error:
        slope.sum().backward()
    assert 'backend="reference"' in str(error.value)


@every_backend
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradient_checkpointing(backend: str, reentrant: bool, dropout: float) -> None:
    if dropout and backend == "sdpa":
        with pytest.raises(RegardError, match="no dropout"):
            regard.attention(*qkv(), dropout=dropout, training=True, backend=backend)
        return
    if reentrant and not dropout:
        leave_to_a_gpu(backend)

    def call(*tensors: Tensor) -> Tensor:
        options: dict[str, Any] = {"dropout": dropout, "training": True, "backend": backend}
        out = regard.attention(*tensors, mask=masks.causal(), **options)
        return regard.attention(out, *tensors[1:], **options)

    def gradients(run: Callable[..., Tensor]) -> list[Tensor | None]:
        leaves = learned(*qkv())
        torch.manual_seed(8)
        run(*leaves).square().sum().backward()
        return [t.grad for t in leaves]

    direct = gradients(call)
    again = gradients(lambda *t: checkpoint(call, *t, use_reentrant=reentrant))
    for one, other in zip(direct, again, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


PENALTIES: dict[str, Callable[[regard.Trace], Tensor]] = {
    "z-loss": lambda t: t.lse.square().mean(),
    "entropy": lambda t: t.entropy.mean(),
    "weights": lambda t: t.weights(keys=[0]).mean(),
}


@every_tracer
@pytest.mark.parametrize("penalty", PENALTIES)
def test_statistics_can_be_trained(backend: str, penalty: str) -> None:
    q, k, v = learned(*qkv())

    def loss() -> Tensor:
        return PENALTIES[penalty](regard.trace(q, k, v, mask=masks.causal(), backend=backend))

    before = loss()
    before.backward()
    with torch.no_grad():
        for t in (q, k):
            assert t.grad is not None
            t -= 0.1 * t.grad
    assert loss() < before


@every_tracer
def test_poison_in_hidden_keys_never_reaches_gradients_of_weights(backend: str) -> None:
    mask, places = HIDDEN["padding"]

    def gradient(k: Tensor) -> Tensor:
        q, k, v = learned(qkv()[0], k, qkv()[2])
        regard.trace(q, k, v, mask=mask, backend=backend).weights().square().sum().backward()
        return q.grad  # type: ignore[return-value]

    k = qkv()[1]
    torch.testing.assert_close(gradient(poisoned(k, places, math.nan)), gradient(k))


@every_tracer
def test_autocast_leaves_questions_alone(backend: str) -> None:
    q, k, v = (t.bfloat16() for t in qkv())
    t = regard.trace(q, k, v, backend=backend)
    wanted = t.weights(), t.received(), t.map(3)
    with torch.autocast(cases.DEVICE, dtype=torch.bfloat16):
        got = t.weights(), t.received(), t.map(3)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


@every_tracer
def test_the_strongest_keys_are_not_those_a_bias_hides(backend: str) -> None:
    t = regard.trace(*qkv(), bias=biases.dense(minus_infinity()), backend=backend)
    top = t.top(5)
    assert (top.indices[:, :, 2, 3:] == -1).all()
    assert set(top.indices[0, 0, 2, :3].tolist()) == {0, 1, 2}
    assert (top.indices[:, 1, 5] == -1).all()
    assert not top.values[:, :, 2, 3:].any()


@every_tracer
def test_the_gradients_of_answers_are_those_of_the_weights_and_logits(backend: str) -> None:
    q, k, v = learned(*qkv())
    t = regard.trace(q, k, v, mask=masks.causal(), backend=backend)
    assert not t.rows.max_logit.requires_grad
    p, s = t.weights(), t.logits()
    for got, want in (
        (t.received().square().sum(), p.sum(-2).square().sum()),
        (t.map(1).square().sum(), p.mean((-1, -2)).square().sum()),
        (t.map(1, pool="max").sum(), p.amax((-1, -2)).sum()),
        (t.max_logit.sum(), s.amax(-1).sum()),
    ):
        found, exact = (torch.autograd.grad(x, (q, k), retain_graph=True) for x in (got, want))
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("n", [1, 31, 33, 100, 191, 193, 300, 767, 769, 1100])
@pytest.mark.parametrize("width", [1, 8])
def test_one_late_nan_reaches_no_earlier_row_of_any_block(n: int, width: int) -> None:
    """PyTorch's CPU kernel is asked one row per block whether something leaked."""
    source = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, 2, n, width, generator=source) for _ in range(3))
    clean = regard.attention(q, k, v, mask=masks.causal(), backend="sdpa")
    for late in sorted({0, 1 % n, n // 3, n // 2, n - 2, n - 1} & set(range(n))):
        poisoned_v = v.clone()
        poisoned_v[0, 1, late, width // 2] = math.nan
        out = regard.attention(q, k, poisoned_v, mask=masks.causal(), backend="sdpa")
        assert torch.equal(out[:, 0], clean[:, 0])
        torch.testing.assert_close(out[:, :, :late], clean[:, :, :late])
        assert out[0, 1, late:, width // 2].isnan().all()


@every_tracer
def test_a_soft_cap_lets_no_hidden_poison_into_gradients(backend: str) -> None:
    q, k, v = qkv(Q=5, K=5)
    k[:, :, 3:] = math.nan
    three = learned(q, k, v)
    regard.attention(*three, mask=masks.prefix(3), softcap=5.0, backend=backend).sum().backward()
    wanted = learned(q, k[:, :, :3], v[:, :, :3])
    regard.attention(*wanted, softcap=5.0, backend="reference").sum().backward()
    torch.testing.assert_close(three[0].grad, wanted[0].grad)
    for got, want in zip(three[1:], wanted[1:], strict=True):
        assert got.grad is not None
        torch.testing.assert_close(got.grad[:, :, :3], want.grad)
        assert not got.grad[:, :, 3:].any()


@every_tracer
@pytest.mark.parametrize("mask", [None, masks.prefix(0)], ids=["none", "nothing"])
def test_a_sink_of_minus_infinity_is_none(backend: str, mask: masks.Mask | None) -> None:
    sink = torch.tensor([-math.inf, 0.5], device=cases.DEVICE, requires_grad=True)
    three = learned(*qkv())
    t = regard.trace(*three, mask=mask, sink=sink, backend=backend)
    without = regard.trace(*three, mask=mask, backend="reference")
    torch.testing.assert_close(t.entropy[:, 0], without.entropy[:, 0])
    torch.testing.assert_close(t.out[:, 0], without.out[:, 0])
    (t.entropy.sum() + t.out.sum()).backward()
    assert sink.grad is not None
    assert sink.grad[0] == 0
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (*three, sink))


@every_tracer
@pytest.mark.parametrize("part", ["q", "k"])
def test_a_row_that_is_no_number_leaves_what_it_does_not_see_alone(backend: str, part: str) -> None:
    q, k, v = qkv(Q=6, K=6)
    (q if part == "q" else k)[:, :, 2] = math.nan
    t = regard.trace(q, k, v, mask=masks.causal(), backend=backend)
    seen = torch.ones(6, 6, dtype=torch.bool, device=cases.DEVICE).tril()
    rows = torch.arange(6, device=cases.DEVICE)[:, None]
    broken = seen & ((rows == 2) if part == "q" else (rows >= 2))
    # Triton's largest of a number and NaN is the number.
    largest = [] if backend == "triton" else [t.map(6, pool="max")]
    for got in (t.weights(), t.map(6), *largest):
        assert torch.equal(got.isnan(), broken.expand_as(got))
        assert not got[(~seen).expand_as(got)].any()
    received = t.received()
    assert torch.equal(received.isnan(), broken.any(0).expand_as(received))


@every_backend
@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(2)], ids=str)
def test_scales_that_are_not_above_zero(
    backend: str, scale: float, mask: masks.Mask | None
) -> None:
    q, k, v = qkv(Q=7, K=7)
    inputs = check(q, k, v, **DEFAULTS | {"mask": mask, "scale": scale})
    if BACKENDS[backend].refuses(inputs, statistics=False):
        assert backend == "sdpa"
        assert regard.plan(q, k, v, mask=mask, scale=scale).backend != "sdpa"
        return
    got = regard.attention(q, k, v, mask=mask, scale=scale, backend=backend)
    want = regard.attention(*(t.double() for t in (q, k, v)), mask=mask, scale=scale)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@every_backend
@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_query_that_is_not_finite_has_no_logits(
    backend: str, poison: float, softcap: float | None
) -> None:
    """Its row is NaN, as are its gradients, also where all its products are -inf."""
    if backend == "sdpa" and softcap is not None:
        return
    if backend == "triton":
        pytest.skip("its kernels do not look at queries: it took 7 % of their time at width 64")
    q, k, v = qkv(Q=5, K=5)
    # All products with the query's first number are -inf.
    k[..., 0] = -k[..., 0].abs() * (1 if poison > 0 else -1)
    q[0, 1, 2, 0] = poison
    mask = masks.causal() & masks.padding([5, 0])
    q[1, 0, 3, 0] = poison
    leaves = learned(q, k, v)
    inputs = checked(leaves, mask=masks.causal() if backend == "sdpa" else mask, softcap=softcap)
    run = BACKENDS[backend]
    rows = None if backend == "sdpa" else run.observe(inputs)
    out = run.attend(inputs)
    broken = torch.zeros(2, 2, 5, dtype=torch.bool, device=cases.DEVICE)
    broken[0, 1, 2] = True
    # In the second sequence nobody sees anything, so that query is not heard of.
    broken[1, 0, 3] = backend == "sdpa"
    assert torch.equal(out.isnan(), broken[..., None].expand_as(out))
    if rows is None:
        # PyTorch's backward pass would spoil keys that the row does not see: it is given finite
        # numbers, and NaN comes to the gradients from what is made of the output.
        return
    for found in (rows.lse, rows.max_logit, rows.entropy):
        assert torch.equal(found.isnan(), broken)
    assert torch.equal(rows.out.isnan(), out.isnan())
    (rows.out.sum() + rows.lse.sum()).backward()
    dq, dk, _ = (t.grad for t in leaves)
    assert dq is not None
    assert dk is not None
    assert dq[0, 1, 2, 1:].isnan().all()
    assert dk[0, 1, :3, 1:].isnan().all()
    assert dq[~broken].isfinite().all()
    assert dk[0, 0].isfinite().all()
    assert dk[0, 1, 3:].isfinite().all()


@every_backend
@pytest.mark.parametrize("poison", [math.inf, -math.inf], ids=["inf", "minus-inf"])
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["none", "causal"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_logits_of_an_infinite_key_are_those_of_arithmetic(
    backend: str, poison: float, mask: masks.Mask | None, softcap: float | None
) -> None:
    """Whom it gives minus infinity does not look at it; all others who see it have no answer. All
    questions about its pairs agree."""
    if backend == "sdpa" and softcap is not None:
        return
    q, k, v = qkv(Q=7, K=7)
    # In one head every second query has a product of minus infinity, in another all have.
    q[0, 0, :, 0] = q[0, 0, :, 0].abs() * (1 - 2 * (torch.arange(7, device=q.device) % 2))
    q[1, 1, :, 0] = -q[1, 1, :, 0].abs() * (1 if poison > 0 else -1)
    k[0, 0, 2, 0] = k[1, 1, 2, 0] = poison
    options = {"mask": mask, "softcap": softcap}
    with torch.no_grad():
        want = BACKENDS["reference"].observe(checked([q, k, v], **options))
        unseen = want.out.isnan().all(-1)
        if softcap is None:
            assert unseen[0, 0].any()
            assert not unseen[0, 0].all()
            assert not unseen[1, 1].any()
        run = BACKENDS[backend]
        if backend == "sdpa":
            out = run.attend(checked([q, k, v], **options))
            torch.testing.assert_close(out, want.out, equal_nan=True)
            return
        got = run.observe(checked([q, k, v], **options))
        for name, found, true in zip(Rows._fields, got, want, strict=True):
            torch.testing.assert_close(found[~unseen], true[~unseen], msg=name)
            # The largest logit of a row without an answer may be told as infinite, or as NaN.
            assert name == "max_logit" or found[unseen].isnan().all()
    for learns in (False, True):
        with torch.set_grad_enabled(learns):
            t = regard.trace(q, k, v, backend=backend, **options)
            weights = t.weights()
            assert torch.equal(weights.isnan().any(-1), unseen)
            seen = ~unseen
            torch.testing.assert_close(t.mass([2])[seen], weights[..., 2][seen])
            torch.testing.assert_close(
                t.top(7).values[seen], weights.sort(-1).values.flip(-1)[seen]
            )
            torch.testing.assert_close(t.received()[1, 1], weights[1, 1].sum(-2))
            torch.testing.assert_close(t.map(7, pool="max")[1, 1], weights[1, 1])
