"""Calls that a monitor looks at once the forward pass is over give what they gave at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import regard
from regard.calls.watchers import begin, end
from regard.errors import RegardWarning
from regard.monitoring import Report
from regard.watching.pytorch import attention_mode, deferred_calls
from regard.watching.pytorch.deferred_calls import DeferredCalls

HEADS, WIDTH = 2, 16


class Layer(nn.Module):
    """Attention as people write it, and what some do around it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after: Callable[[Tensor, Tensor, Tensor], None] = lambda q, k, v: None
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.how: dict[str, Any] = {"is_causal": True}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        with self.around():
            y = F.scaled_dot_product_attention(q, k, v, **self.how)
        self.after(q, k, v)
        found: Tensor = x + self.out(y.transpose(1, 2).flatten(2).to(x.dtype))
        return found


class Stack(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.through: Callable[..., Tensor] = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.through(layer, x)
        return x


def x(n: int = 7) -> Tensor:
    return torch.randn(2, n, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call that might wait, whether it did."""
    found: list[bool] = []
    take = DeferredCalls.take

    def counted(self: DeferredCalls, *call: Any) -> bool:
        found.append(take(self, *call))
        return found[-1]

    monkeypatch.setattr(DeferredCalls, "take", counted)
    return found


@contextmanager
def at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred_calls, "_may_wait", lambda *_: False)
        yield


def monitored(model: nn.Module, steps: int = 2, **how: Any) -> Report:
    monitor = regard.Monitor(model, every=steps, look=1, rules=[], **how)
    report = None
    torch.manual_seed(2)
    with monitor:
        for _ in range(steps):
            model(x()).square().mean().backward()
            report = monitor.step() or report
            model.zero_grad()
    assert report is not None
    return report


def bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def through_checkpoint(layer: nn.Module, given: Tensor) -> Tensor:
    found: Tensor = checkpoint(layer, given, use_reentrant=False)
    return found


@pytest.mark.parametrize(
    "how", [{}, {"is_causal": True}, {"scale": 0.7}, {"dropout_p": 0.5}], ids=str
)
def test_they_are_what_they_were(how: dict[str, Any], waited: list[bool]) -> None:
    model = Stack()
    for layer in model.layers:
        layer.how = how
    found = monitored(model)
    assert waited == [True] * 6
    with at_once():
        assert found.layers == monitored(model).layers


def test_autocast_of_a_call_is_that_of_its_trace(waited: list[bool]) -> None:
    """Entered inside of a module, it is over when the forward pass is."""
    model = Stack().bfloat16()
    model.through = lambda layer, given: layer(given.bfloat16())
    for layer in model.layers:
        layer.around = bfloat16
    with pytest.MonkeyPatch.context() as patch:
        on: list[bool] = []
        traced = attention_mode._traced

        def noted(*call: Any) -> Any:
            on.append(torch.is_autocast_enabled("cpu"))
            return traced(*call)

        patch.setattr(attention_mode, "_traced", noted)
        found = monitored(model)
        assert on == [True] * 6
    assert waited == [True] * 6
    with at_once():
        assert found.layers == monitored(model).layers


@pytest.mark.parametrize("which", ["queries", "values"])
def test_what_autocast_copies_does_not_wait(which: str, waited: list[bool]) -> None:
    """Autograd holds the copies: to hold what they were made of would take more memory."""
    model = Stack(1)

    def forward(given: Tensor) -> Tensor:
        q, k, v = model.layers[0].qkv(given).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        q, v = (q.float(), v) if which == "queries" else (q, v.float())
        assert {q.dtype, v.dtype} == {torch.bfloat16, torch.float32}
        return F.scaled_dot_product_attention(q, k, v)

    model.layers[0].forward = forward
    with bfloat16():
        found = monitored(model)
    assert waited == [False] * 2
    assert set(found.layers) == {"layers.0"}


def test_in_double_precision_autocast_copies_nothing(waited: list[bool]) -> None:
    model = Stack().double()
    model.through = lambda layer, given: layer(given.double())
    for layer in model.layers:
        layer.around = bfloat16
    monitored(model)
    assert waited == [True] * 6


def test_no_more_than_so_many_bytes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model, waiting, running = Stack(5), [], []
    monitor = regard.Monitor(model, every=1, look=1, rules=[])

    def count(q: Tensor, k: Tensor, v: Tensor) -> None:
        waiting.append(len(monitor._watch._deferred._calls))
        running.append(list(monitor._watch._running))

    for layer in model.layers:
        layer.after = count
    call = 2 * 7 * 3 * WIDTH * 4
    monkeypatch.setattr(deferred_calls, "MANY", 2 * call)
    for _ in range(2):
        with monitor:
            model(x())
            found = monitor.step()
        assert waiting == [1, 0, 1, 0, 1]
        assert running == [["", f"layers.{i}"] for i in range(5)]
        waiting.clear()
        running.clear()
        monitor = regard.Monitor(model, every=1, look=1, rules=[])
    monitor.close()
    for layer in model.layers:
        layer.after = lambda q, k, v: None
    monkeypatch.setattr(deferred_calls, "MANY", 100 * call)
    assert found is not None
    assert list(found.layers) == [f"layers.{i}" for i in range(5)]
    assert found.layers == monitored(model, steps=1).layers


def test_what_checkpointing_lets_go_of_is_not_held(waited: list[bool]) -> None:
    model = Stack()
    model.through = through_checkpoint
    found = monitored(model)
    assert waited
    assert not any(waited)
    model.through = lambda layer, given: layer(given)
    assert found.layers == monitored(model).layers


def test_masks_are_looked_at_at_once(waited: list[bool]) -> None:
    model = Stack()
    for layer in model.layers:
        layer.how = {"attn_mask": torch.ones(7, 7).tril().bool()}
    monitored(model)
    assert not waited


def test_nothing_is_held_after_the_forward_pass() -> None:
    model, held = Stack(), []
    monitor = regard.Monitor(model, every=100, look=1, rules=[])
    with monitor:
        model.layers[0].after = lambda q, k, v: held.append(weakref.ref(q.untyped_storage()))
        seen: list[int] = []
        model.layers[2].after = lambda q, k, v: seen.append(len(monitor._watch._deferred._calls))
        loss = model(x()).square().mean()
        assert seen == [3]
        assert monitor._watch._deferred._calls == []
        del loss
        gc.collect()
        assert held[0]() is None


def test_tensors_that_are_written_to_are_told_and_then_looked_at_at_once(
    waited: list[bool],
) -> None:
    model = Stack()

    def overwrite(q: Tensor, k: Tensor, v: Tensor) -> None:
        with torch.no_grad():
            q.zero_()

    model.layers[1].after = overwrite
    monitor = regard.Monitor(model, every=1, look=1, rules=[])
    with monitor:
        model(x())
        with pytest.warns(RegardWarning, match="layers.1 were written to or freed after it"):
            first = monitor.step()
        assert waited == [True] * 3
        model(x())
        second = monitor.step()
    assert waited[3:] == [False] * 3
    assert first is not None
    assert second is not None
    assert set(first.layers) == {"layers.0", "layers.2"}
    assert set(second.layers) == {"layers.0", "layers.1", "layers.2"}
    assert second.layers["layers.0"] == first.layers["layers.0"]
    model.layers[1].after = lambda q, k, v: None
    assert second.layers == monitored(model, steps=1).layers


@pytest.mark.parametrize("which", ["queries", "keys", "outputs"])
def test_calls_that_wait_to_be_read_may_be_written_to(which: str) -> None:
    """Those that are looked at at once may be read together with others, later."""
    model = Stack()
    clean = monitored(model, steps=1)
    monitor = regard.Monitor(model, every=1, look=1, rules=[])
    see = monitor._watch.see

    def overwrite(trace: Any) -> None:
        see(trace)
        if monitor._watch._running[-1] == "layers.1":
            x = trace.inputs
            {"queries": x.q, "keys": x.k, "outputs": trace.rows.out}[which].zero_()

    monitor._watch.see = overwrite  # type: ignore[method-assign]
    with monitor, at_once():
        model(x())
        with pytest.warns(RegardWarning, match="layers.1 were written to or freed after it"):
            first = monitor.step()
        model(x())
        second = monitor.step()
    assert first is not None
    assert second is not None
    assert first.layers == {path: clean.layers[path] for path in ("layers.0", "layers.2")}
    assert second.layers == clean.layers


def test_to_be_too_late_is_no_error() -> None:
    """What could not be looked at did attend: it is told of, and the run goes on."""
    model = Stack(1)

    def overwrite(q: Tensor, k: Tensor, v: Tensor) -> None:
        with torch.no_grad():
            v.zero_()

    model.layers[0].after = overwrite
    with regard.Monitor(model, every=1, look=1, rules=[], on_error="raise") as monitor:
        model(x())
        with pytest.warns(RegardWarning, match="layers.0"):
            assert monitor.step() is not None
        model(x())
        report = monitor.step()
    assert report is not None
    assert set(report.layers) == {"layers.0"}


def test_a_batch_of_nothing_has_no_memory_to_lose(waited: list[bool]) -> None:
    with regard.Monitor(Stack(), every=1, look=1, rules=[], on_error="raise") as monitor:
        for _ in range(2):
            monitor.model(x()[:0])
            report = monitor.step()
    assert waited == [True] * 6
    assert report is not None


def test_memory_that_was_freed_is_not_read() -> None:
    """Sharding frees that of parameters once a layer has run, and queries may be one."""
    model = Stack()
    learned = nn.Parameter(torch.randn(1, HEADS, 7, WIDTH // HEADS))

    def forward(given: Tensor) -> Tensor:
        k = given.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        out: Tensor = F.scaled_dot_product_attention(learned.expand_as(k), k, k)
        learned.untyped_storage().resize_(0)
        return out.transpose(1, 2).flatten(2)

    model.layers[1].forward = forward
    with regard.Monitor(model, every=1, look=1, rules=[]) as monitor:
        model(x())
        with pytest.warns(RegardWarning, match="layers.1 were written to or freed after it"):
            report = monitor.step()
    assert report is not None
    assert set(report.layers) == {"layers.0", "layers.2"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_calls_before_an_error_are_looked_at(error: type[BaseException]) -> None:
    model = Stack()

    def fail(q: Tensor, k: Tensor, v: Tensor) -> None:
        raise error

    model.layers[2].after = fail
    monitor = regard.Monitor(model, every=1, look=1, rules=[])
    with monitor:
        with pytest.raises(error):
            model(x())
        assert monitor._watch._active is None
        assert monitor._watch._deferred._calls == []
        report = monitor.step()
    assert report is not None
    assert set(report.layers) == {"layers.0", "layers.1", "layers.2"}


def test_an_interrupt_while_they_are_looked_at_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Stack()
    traced, calls = attention_mode._traced, []

    def interrupted(*call: Any) -> Any:
        calls.append(call)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return traced(*call)

    monkeypatch.setattr(attention_mode, "_traced", interrupted)
    monitor = regard.Monitor(model, every=1, look=1, rules=[])
    with monitor:
        with pytest.raises(KeyboardInterrupt):
            model(x())
        assert monitor._watch._active is None
        assert monitor._watch._deferred._calls == []
        assert not torch.overrides._get_current_function_mode_stack()
        model(x())
        assert len(calls) == 2 + 3
        report = monitor.step()
    assert report is not None
    assert set(report.layers) == {"layers.0", "layers.1", "layers.2"}


def test_an_interrupt_before_any_is_looked_at_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model ran to its end, and nothing of it was seen: that is no error of anybody's."""
    model = Stack()

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with regard.Monitor(model, every=1, look=1, rules=[], on_error="raise") as monitor:
        with monkeypatch.context() as patch:
            patch.setattr(attention_mode, "_traced", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(x())
        monitor.step()
        model(x())
        report = monitor.step()
    assert report is not None
    assert set(report.layers) == {"layers.0", "layers.1", "layers.2"}


@pytest.mark.parametrize("first", [False, True], ids=["inside", "outside"])
def test_a_second_watch_is_shown_calls_as_they_come(first: bool, waited: list[bool]) -> None:
    model = Stack()
    monitor, other = regard.Monitor(model, every=1, look=1, rules=[]), regard.watch(model)
    with ExitStack() as both:
        if first:
            seen = both.enter_context(other)
        both.enter_context(monitor)
        if not first:
            seen = both.enter_context(other)
        model(x())
        report = monitor.step()
    assert not any(waited)
    assert report is not None
    assert set(report.layers) == set(seen) == {"layers.0", "layers.1", "layers.2"}


def test_gradients_are_those_of_a_run_that_nobody_watches() -> None:
    model = Stack()
    model(x()).square().mean().backward()
    want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with regard.Monitor(model, every=1, look=1, rules=[]):
        model(x()).square().mean().backward()
    got = [p.grad for p in model.parameters()]
    assert all(a is not None and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_calls_that_others_are_shown_do_not_wait() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    mine, other = (lambda trace: None), (lambda trace: None)
    begin(mine)
    try:
        assert deferred_calls._may_wait(q, k, v)
        begin(other)
        assert not deferred_calls._may_wait(q, k, v)
    finally:
        end(other)
        end(mine)
