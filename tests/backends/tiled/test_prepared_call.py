"""Calls that come again run as they were made ready once, each with its own numbers and memory."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import biases, masks
from regard.backends.contract import Rows, run_again
from regard.backends.reference import Reference
from regard.backends.tiled import Tiled, call_memory, pieces, prepared_call
from regard.backends.tiled.loop import loop_for
from regard.backends.tiled.operators import run
from regard.cancellation import UnwantedError, stoppable
from regard.inputs import AttentionInputs, check
from regard.masks.algebra import Mask
from tests.backends.tiled.packed_product import Product

pytestmark = pytest.mark.skipif(
    loop_for(torch.device("cpu"), torch.float32) is None, reason="there is no compiled loop"
)
SHAPES = {
    "plain": ((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 3)),
    "grouped": ((1, 6, 7, 8), (1, 2, 9, 8), (1, 2, 9, 8)),
    "one query": ((1, 6, 1, 8), (1, 2, 9, 8), (1, 2, 9, 8)),
    "several tiles": ((1, 2, 300, 16), (1, 1, 700, 16), (1, 1, 700, 16)),
}
MASKS = {"none": None, "causal": masks.causal(), "window": masks.window(3, 1)}


def inputs(*qkv: Tensor, **options: Any) -> AttentionInputs:
    nothing = dict.fromkeys(("mask", "score", "bias", "softcap", "sink", "scale"))
    return check(*qkv, **nothing | {"dropout": 0.0, "training": False} | options)


def draw(shape: str, mask: Mask | None = None, seed: int = 0) -> AttentionInputs:
    source = torch.Generator().manual_seed(seed)
    return inputs(*(torch.randn(each, generator=source) for each in SHAPES[shape]), mask=mask)


def prepared(x: AttentionInputs, *, statistics: bool = True) -> Any:
    """How it is repeated; None if that is the plain way."""
    plainly = run_again(Tiled(), x, statistics=statistics)
    return prepared_call.prepared(x, plainly, statistics=statistics)


def assert_right(rows: Rows, x: AttentionInputs) -> None:
    expected = Reference().observe(replace(x, q=x.q.double(), k=x.k.double(), v=x.v.double()))
    for name in ("out", "lse", "max_logit", "entropy"):
        found, true = getattr(rows, name), getattr(expected, name)
        torch.testing.assert_close(found, true.float(), rtol=1e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_call_has_its_own_answer(shape: str, mask: str) -> None:
    calls = [draw(shape, MASKS[mask], seed) for seed in range(3)]
    observe, attend = (prepared(calls[0], statistics=s) for s in (True, False))
    found = [observe(x.q, x.k, x.v) for x in calls]
    for rows, x in zip(found, calls, strict=True):
        assert_right(rows, x)
        assert torch.equal(attend(x.q, x.k, x.v), rows.out)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_gives_what_a_lone_call_gives(
    dtype: torch.dtype, shape: str, mask: str
) -> None:
    calls = [
        inputs(*(t.to(dtype) for t in (x.q, x.k, x.v)), mask=x.mask)
        for x in (draw(shape, MASKS[mask], seed) for seed in range(3))
    ]
    observe, attend = (prepared(calls[0], statistics=s) for s in (True, False))
    for x in calls:
        rows, alone = observe(x.q, x.k, x.v), run(x, statistics=True)
        assert rows.out.dtype == dtype
        for name in ("out", "lse", "max_logit", "entropy"):
            assert torch.equal(getattr(rows, name), getattr(alone, name)), name
        assert torch.equal(attend(x.q, x.k, x.v), alone.out)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(21)], ids=str)
def test_packed_matrices(product: Product, mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made ready once: each has its own numbers, and oneDNN may be switched off between them."""
    given = [
        [torch.randn(1, heads, 70, 9).to(product.dtype) for heads in (4, 2, 2)] for _ in range(3)
    ]
    first, *_ = given
    observe, attend = (prepared(inputs(*first, mask=mask), statistics=s) for s in (True, False))
    for each in given:
        alone, rows = run(inputs(*each, mask=mask), statistics=True), observe(*each)
        product.sizes.clear()
        assert torch.equal(attend(*each), alone.out)
        assert product.sizes
        for name in ("out", "lse", "max_logit", "entropy"):
            assert torch.equal(getattr(rows, name), getattr(alone, name)), name
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    product.sizes.clear()
    observe(*first)
    assert not product.sizes


def each_its_own(n: int) -> Mask:
    """Another mask for each of two sequences: padding on the left."""
    return masks.keep((torch.arange(n) >= torch.tensor([[0], [n - 2]]))[:, None, None])


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(
    "mask",
    [each_its_own(5), masks.padding([3, 0]), masks.documents([0, 0, 1, 1, 2]), masks.dilated(2)],
    ids=str,
)
def test_little_calls_under_any_mask(mask: Mask, queries: int) -> None:
    calls = []
    for seed in range(3):
        x = draw("plain", seed=seed)
        calls.append(inputs(x.q[:, :, :queries], x.k, x.v, mask=mask))
    observe, attend = (prepared(calls[0], statistics=s) for s in (True, False))
    found = [observe(x.q, x.k, x.v) for x in calls]
    for rows, x in zip(found, calls, strict=True):
        assert_right(rows, x)
        assert torch.equal(attend(x.q, x.k, x.v), rows.out)


def test_tables_of_a_mask_are_not_kept_where_they_may_be_large() -> None:
    assert prepared(draw("several tiles", masks.documents(torch.arange(700) // 50))) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("where", ["causal", "padding"])
def test_a_masked_value_that_is_not_finite_does_no_harm(where: str, dtype: torch.dtype) -> None:
    x = draw("plain", masks.causal() if where == "causal" else masks.padding([4, 4]))
    given = q, k, v = [t.to(dtype) for t in (x.q, x.k, x.v)]
    observe, attend = (
        prepared(inputs(*given, mask=x.mask), statistics=statistics) for statistics in (True, False)
    )
    v[:, :, -1] = math.nan
    rows = observe(q, k, v)
    assert rows.out[:, :, :-1].isfinite().all()
    assert rows.out[:, :, -1].isnan().all() == (where == "causal")
    assert rows.out.dtype == dtype
    torch.testing.assert_close(attend(q, k, v), rows.out, equal_nan=True)


def test_many_row_tiles_go_in_lots_and_stop_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LOT", 1)
    x = draw("several tiles", masks.causal())
    observe, steps = prepared(x), []
    assert_right(observe(x.q, x.k, x.v), x)

    def stop() -> None:
        steps.append(0)
        if len(steps) == 2:
            raise UnwantedError

    with pytest.raises(UnwantedError), stoppable(stop):
        observe(x.q, x.k, x.v)


def test_a_loop_that_is_not_there_any_more_is_not_called(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    x = draw("plain")
    observe, loop = prepared(x), loop_for(x.q.device, x.q.dtype)
    request.getfixturevalue("uncompiled")
    monkeypatch.setattr(loop, "attend_again", lambda _: pytest.fail("it was called"))
    monkeypatch.setattr(
        "regard.backends.tiled.loop.compiled.Loop.attend", lambda *_: pytest.fail("it was called")
    )
    assert_right(observe(x.q, x.k, x.v), x)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fills memory that nobody has written to with NaN, and lists what was asked for."""
    asked: list[Any] = []

    def empty(*how: Any) -> Tensor:
        asked.append(how)
        made: Tensor = call_memory._through_the_dispatcher(*how)
        return made.fill_(255 if made.dtype == torch.uint8 else math.nan)

    monkeypatch.setattr(call_memory, "_spare", [])
    monkeypatch.setattr(call_memory, "empty", empty)
    monkeypatch.setattr(prepared_call, "empty", empty)
    return asked


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_memory_is_not_read_before_it_is_written(shape: str, mask: str, poison: list[Any]) -> None:
    x = draw(shape, MASKS[mask])
    assert_right(prepared(x)(x.q, x.k, x.v), x)
    assert len(poison) == 3


@pytest.mark.parametrize("mask", MASKS)
def test_packed_matrices_in_memory_that_nobody_has_written_to(
    mask: str, product: Product, poison: list[Any]
) -> None:
    given = [torch.randn(1, heads, 70, 9).to(product.dtype) for heads in (4, 2, 2)]
    x = inputs(*given, mask=MASKS[mask])
    found, alone = prepared(x)(*given), run(x, statistics=True)
    for name in ("out", "lse", "max_logit", "entropy"):
        assert torch.equal(getattr(found, name), getattr(alone, name)), name


def test_room_is_used_once_more_and_by_one_call_at_a_time(poison: list[Any]) -> None:
    one = call_memory.borrow(100)
    other = call_memory.borrow(100)
    assert one.address != other.address
    call_memory.give_back(one, 100)
    assert call_memory.borrow(200) is one
    # What is large is not kept.
    size = call_memory.SPARE + 1
    call_memory.give_back(call_memory.borrow(size), size)
    assert [how[0][0] for how in poison] == [call_memory.SPARE] * 2 + [size]
    assert not call_memory._spare


def test_calls_use_the_same_room_but_for_large_ones(
    poison: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw("several tiles")
    observe = prepared(x)
    for _ in range(3):
        observe(x.q, x.k, x.v)
    assert len([how for how in poison if how[2] == torch.uint8]) == 1
    monkeypatch.setattr(call_memory, "_spare", [])
    monkeypatch.setattr(call_memory, "SPARE", 100)
    assert_right(observe(x.q, x.k, x.v), x)
    assert not call_memory._spare


@pytest.mark.parametrize("under", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_what_comes_out_is_a_tensor_like_any_other(under: Any) -> None:
    x = draw("plain")
    with under():
        rows = prepared(x)(x.q, x.k, x.v)
        for t, like in ((rows.out, x.q.new_empty(2, 4, 5, 3)), (rows.lse, x.q.new_empty(2, 4, 5))):
            assert t.is_inference() == like.is_inference()
            assert t.stride() == like.stride()
            assert not t.requires_grad
    assert rows.out.untyped_storage().nbytes() == rows.out.nbytes
    assert rows.out.untyped_storage().data_ptr() != rows.lse.untyped_storage().data_ptr()


def test_threads_do_not_share_a_call() -> None:
    calls = [draw("several tiles", masks.causal(), seed) for seed in range(8)]
    observe = prepared(calls[0])
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda x: observe(x.q, x.k, x.v), calls))
    for rows, x in zip(found, calls, strict=True):
        assert_right(rows, x)


@pytest.mark.parametrize(
    "change",
    {
        "gradients": lambda q, k, v: ((q.requires_grad_(), k, v), {}),
        "half precision, apart": lambda q, k, v: (
            (q.half(), k.half().mT.contiguous().mT, v.half()),
            {},
        ),
        "double precision": lambda q, k, v: ((q.double(), k.double(), v.double()), {}),
        "a sink": lambda q, k, v: ((q, k, v), {"sink": torch.zeros(4)}),
        "a bias": lambda q, k, v: ((q, k, v), {"bias": biases.alibi([0.1] * 4)}),
        "rows that lie apart": lambda q, k, v: ((q, k.mT.contiguous().mT, v), {}),
        "nothing": lambda q, k, v: ((q[:, :, :0], k, v), {}),
    }.items(),
    ids=lambda item: item[0],
)
def test_other_calls_are_looked_at_one_by_one(change: Any) -> None:
    x = draw("plain")
    tensors, options = change[1](x.q, x.k, x.v)
    assert prepared(inputs(*tensors, **options)) is None
