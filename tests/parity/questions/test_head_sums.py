"""What the rows of each head add up to: by the kernel, and by operations of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.backends.contract import HEAD_SUMS
from regard.monitoring.telemetry import Readings, Telemetry, head_sums
from regard.seen import Statistics
from tests.monitoring.test_monitor import Given
from tests.parity import cases

MASKS: dict[str, masks.Mask | None] = {
    "none": None,
    "causal": masks.causal(),
    "causal_from_start": masks.causal(offset=0),
    "nothing_at_first": masks.causal(offset=-21),
    "nothing": masks.causal(offset=-99),
    "wide_window": masks.causal() & masks.window(99),
}
SIZES = {"square": (37, 37), "longer": (21, 50), "shorter": (50, 37), "one": (1, 33)}
Change = Callable[[Tensor, Tensor, Tensor], None]
LOW = (torch.float32, torch.bfloat16)


def spoilt(where: str, how: float) -> Change:
    def spoil(q: Tensor, k: Tensor, v: Tensor) -> None:
        {"q": q, "k": k, "v": v}[where][0, -1, -2:-1] = how

    return spoil


def first_key_spoilt(q: Tensor, k: Tensor, v: Tensor) -> None:
    k[1, 0, 0] = math.nan


def huge(q: Tensor, k: Tensor, v: Tensor) -> None:
    q.mul_(100)
    k.mul_(100)


def all_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Logits of 10,000 and more, in which the first key is as large as any."""
    q.copy_(q[:, :, :1].sign() * 100)
    k.copy_(q[:, ::2, :1])


HARD = {
    f"{how} in {where}": spoilt(where, how)
    for where in "qkv"
    for how in (math.nan, math.inf, -math.inf)
} | {"nan in the first key": first_key_spoilt, "huge": huge, "all alike": all_alike}


def traced(
    Q: int, K: int, dtype: torch.dtype, change: Change | None = None, **how: Any
) -> regard.Trace:
    """A call of two batch entries, four heads over two key heads, keys off centre."""
    torch.manual_seed(Q + K)
    q, k, v = torch.randn(2, 4, Q, 24), torch.randn(2, 2, K, 24) + 0.3, torch.randn(2, 2, K, 10)
    q, k, v = (t.to(cases.DEVICE) for t in (q, k, v))
    if change is not None:
        change(q, k, v)
    return regard.trace(q.to(dtype), k.to(dtype), v.to(dtype), **how)


def assert_as_by_rows(t: regard.Trace, rtol: float = 1e-5, atol: float = 1e-3) -> None:
    sums = head_sums(t)
    assert sums is not None
    assert sums.shape == (len(HEAD_SUMS), *t.inputs.shape[:2])
    got, want = Readings.of_sums([sums, sums]).numbers, Readings.by_rows([t]).numbers
    assert got.shape == (len(HEAD_SUMS), 2, t.inputs.shape.H)
    for layer in got.unbind(1):
        for name, here, there in zip(HEAD_SUMS, layer, want[:, 0], strict=True):
            torch.testing.assert_close(
                here, there, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that heads have several."""
    from regard.backends.triton.questions import head_sums as kernels

    monkeypatch.setattr(kernels, "tile_of", lambda *_: (16, 1))


@pytest.mark.interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        *(("causal", sizes) for sizes in SIZES),
        ("none", "longer"), ("causal_from_start", "shorter"), ("nothing_at_first", "square"),
        ("nothing", "longer"), ("wide_window", "shorter"), ("none", "one"),
    ],
)  # fmt: skip
def test_the_kernel_adds_up_what_rows_tell(mask: str, sizes: str) -> None:
    dtype = LOW[(list(SIZES).index(sizes) + list(MASKS).index(mask)) % 2]
    assert_as_by_rows(traced(*SIZES[sizes], dtype, mask=MASKS[mask], backend="triton"))


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:All-NaN")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("hard", HARD)
def test_what_is_not_finite_or_huge(hard: str) -> None:
    # In turns, so that each kind of number meets both masks and types.
    turn = list(HARD).index(hard)
    mask, dtype = ("none", "causal")[turn // 2 % 2], LOW[turn % 2]
    t = traced(40, 40, dtype, HARD[hard], mask=MASKS[mask], backend="triton")
    largest = t.max_logit[t.max_logit.isfinite()].max()
    # A logit of 10,000 is told to a thousandth, and a weight is its exponential.
    loose = {"rtol": 1e-2, "atol": 1e-2 * 40} if largest > 1e3 else {}
    assert_as_by_rows(t, **loose)
    if hard == "all alike":
        assert largest >= 1e4
        by_name = dict(zip(HEAD_SUMS, Readings.of([t]).numbers[:, 0], strict=True))
        sound = by_name["rows"] - by_name["empty"]
        assert bool((by_name["first"] <= sound * (1 + 1e-5)).all())


@pytest.mark.interpreted
def test_a_scale_and_axes_that_lie_otherwise() -> None:
    """In tiles as large as they are by default."""
    q, k, v = (torch.randn(1, 70, 2, 16).to(cases.DEVICE).transpose(1, 2) for _ in range(3))
    cosine = regard.scores.cosine(0.1)
    for how in ({"score": cosine}, {"scale": -1.0, "mask": masks.causal()}, {"dropout": 0.5}):
        assert_as_by_rows(regard.trace(q, k, v, **how, backend="triton"))
    assert_as_by_rows(regard.trace(q[0], k[0], v[0], backend="triton"))


OTHER: dict[str, Callable[[], dict[str, Any]]] = {
    "window": lambda: {"mask": masks.causal() & masks.window(5)},
    "padding": lambda: {"mask": masks.causal() & masks.padding([3, 20])},
    "documents": lambda: {"mask": masks.documents(torch.arange(20) // 7)},
    "bias": lambda: {"bias": regard.biases.alibi(torch.tensor([0.1] * 4, device=cases.DEVICE))},
    "softcap": lambda: {"softcap": 2.0},
    "sink": lambda: {"sink": torch.zeros(4, device=cases.DEVICE)},
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", OTHER)
def test_other_calls_are_added_up_by_operations_of_pytorch(name: str) -> None:
    t = traced(20, 20, torch.float32, **OTHER[name](), backend="triton")
    assert head_sums(t) is None
    assert torch.equal(Readings.of([t]).numbers, Readings.by_rows([t]).numbers)


@pytest.mark.interpreted
def test_under_a_transform_nothing_is_launched() -> None:
    t = traced(20, 20, torch.float32, mask=masks.causal(), backend="triton")

    def asked(q: Tensor) -> Tensor:
        assert head_sums(t) is None
        return q

    torch.func.vmap(asked)(torch.zeros(3))


@pytest.mark.interpreted
def test_a_monitor_reports_the_same_by_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.backends.triton.questions.second_pass import TritonPass

    torch.manual_seed(0)
    given = torch.randn(3, 1, 2, 20, 16).to(cases.DEVICE)
    by_rows: list[Any] = []
    own = Readings.by_rows
    monkeypatch.setattr(Readings, "by_rows", lambda calls: by_rows.extend(calls) or own(calls))

    def reported() -> Any:
        m = Given(*given, mask=masks.causal(), backend="triton")
        with regard.Monitor(m, every=2, look=1, rules=()) as monitor:
            # Twice in a step, as a layer that is used again; and in two.
            m(), m()
            monitor.step()
            m()
            report = monitor.step()
        assert report is not None
        return report.layers[""]

    got = reported()
    assert not by_rows
    monkeypatch.setattr(TritonPass, "head_sums", lambda *_: None)
    want = reported()
    assert len(by_rows) == 3
    for field in fields(want):
        one, other = getattr(got, field.name), getattr(want, field.name)
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5), field.name


def test_sums_are_in_the_order_of_telemetry() -> None:
    own = [field.name for field in fields(Telemetry)][1:]
    assert (*(field.name for field in fields(Statistics)), *own) == HEAD_SUMS


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_other_backends_leave_it_to_pytorch(backend: str) -> None:
    t = traced(20, 20, torch.float32, mask=masks.causal(), backend=backend)
    assert head_sums(t) is None
    assert Readings.of([t]).numbers.shape == (len(HEAD_SUMS), 1, 4)
