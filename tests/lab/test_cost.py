"""What forms of attention cost, at lengths that take moments; and what the cheap ones lose."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import regard
from regard import masks
from regard.cost.rates import Device
from regard.cost.this_machine import processor
from regard.lab import cost
from regard.lab.apparatus.experiments import seeded

MACHINE = Device("a machine", {"float32": 1e11}, 1e10)


def test_memory_grows_as_n_squared_eager_and_as_n_fused() -> None:
    lengths = (512, 1024, 2048)
    with seeded(0):
        found = cost.measure(("eager", "fused"), lengths, 1, lambda: None)
    assert cost.slopes(lengths, found["eager"])["bytes"] == pytest.approx(2, abs=0.1)
    assert cost.slopes(lengths, found["fused"])["bytes"] < 1.2
    last = found["eager"][-1]
    foreseen = cost.foreseen("eager", 2048, MACHINE)
    assert last["bytes"] == pytest.approx(foreseen["predicted_bytes"], rel=0.1)
    assert found["fused"][-1]["bytes"] < 0.1 * last["bytes"]


def test_a_window_is_foreseen_to_be_quicker_where_texts_are_long() -> None:
    less, more = (cost.foreseen(form, 8192, MACHINE) for form in ("window", "fused"))
    assert less["predicted_seconds"] < 0.1 * more["predicted_seconds"]


def test_forms_take_turns_and_the_least_of_all_rounds_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    times = iter([5.0, 6.0, 3.0, 8.0, 4.0, 7.0])

    def called(form: str, n: int) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            said.append(form)
            return torch.zeros(n)

        return call

    def timed(call: Callable[[], object], repeats: int) -> float:
        call()
        return next(times)

    monkeypatch.setattr(cost, "call_of", called)
    monkeypatch.setattr(cost, "quickest", timed)
    rounds: list[None] = []
    found = cost.measure(("fused", "window"), (256,), 3, lambda: rounds.append(None))
    assert said[:6] == ["fused", "window"] * 3
    assert len(rounds) == 3
    assert found["fused"] == [{"seconds": 3.0, "bytes": 1024.0}]
    assert found["window"] == [{"seconds": 6.0, "bytes": 1024.0}]


def test_long_texts_are_not_measured_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "quickest", lambda call, repeats: 1.0)
    found = cost.measure(("eager", "window"), (64, 2 * cost.MOST_EAGER), 1, lambda: None)
    assert {form: len(runs) for form, runs in found.items()} == {"eager": 1, "window": 2}


def test_a_run_tells_how_far_it_is_and_names_the_processor_it_was_measured_on() -> None:
    told: list[tuple[int, int]] = []
    result = cost.run(
        lengths=(64, 128),
        repeats=2,
        steps=1,
        progress=lambda _, done, total: told.append((done, total)),
    )
    assert told[:3] == [(1, 505), (251, 505), (501, 505)]
    assert told[-1] == (505, 505)
    assert result.numbers["device"]["name"] == f"one thread of {processor()}"
    assert result.answer.startswith(f"On one thread of {processor()}, time grows as n to the ")


def test_eager_code_is_the_attention_that_is_fused() -> None:
    with seeded(0):
        q, k, v = torch.randn(3, 1, 2, 65, 16)
        torch.testing.assert_close(
            cost.eager(q, k, v), regard.attention(q, k, v, mask=masks.causal())
        )


def test_linear_attention_is_counted_as_pytorch_counts_it() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(1, cost.HEADS, 4 * cost.CHUNK, cost.WIDTH)
    with FlopCounterMode(display=False) as counted:
        cost.linear_attention(x, x, x, chunk=cost.CHUNK)
    assert counted.get_total_flops() == 2 * cost.linear_macs(4 * cost.CHUNK)


def test_cheap_forms_recall_less_of_what_lies_far_back() -> None:
    found = {}
    for form in ("fused", "window", "linear"):
        with seeded(0):
            found[form] = cost.train(cost.Recaller(form), 150, lambda: None)
    assert found["fused"]["far"] > 0.9
    assert found["window"]["far"] < 0.2
    assert found["linear"]["far"] < found["fused"]["far"] - 0.2


def test_this_machine_is_measured_in_the_time_of_its_processor() -> None:
    with seeded(0):
        found = cost.this_machine()
    assert 1e9 < found.rate("float32") < 1e13
    assert 1e8 < found.bandwidth < 1e12
    # Waiting is not work.
    assert cost.quickest(lambda: time.sleep(0.05), 2) < 0.04
