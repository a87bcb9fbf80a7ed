"""Models that are compiled as one graph cannot be looked into: they run on, unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import RegardWarning
from tests.watching.test_watch import X, hooks, model

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def whole(m: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(m, backend="aot_eager", fullgraph=True)
    return compiled


def each_layer(m: Any) -> nn.Module:
    for i, layer in enumerate(m.layers):
        m.layers[i] = whole(layer)
    return m


def in_place(m: Any) -> nn.Module:
    for layer in m.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return m


def gradients(m: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    m.zero_grad()
    m(X).square().mean().backward()
    run()
    return [p.grad.clone() for p in m.parameters() if p.grad is not None]


@pytest.mark.parametrize("compiled", [whole, each_layer, in_place])
def test_a_monitor_does_not_end_the_run(compiled: Callable[[Any], nn.Module]) -> None:
    torch._dynamo.reset()
    m = compiled(model(is_causal=True))
    want = gradients(m, lambda: None)
    with regard.Monitor(m, every=4, look=2, rules=()) as monitor:
        with pytest.warns(RegardWarning, match="compiled with fullgraph=True, so it runs unseen"):
            got = gradients(m, monitor.step)
        for _ in range(3):
            torch.testing.assert_close(gradients(m, monitor.step), want, rtol=0, atol=0)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert not any(hooks(part) for part in m.modules())


def test_it_does_where_that_is_asked_for() -> None:
    torch._dynamo.reset()
    m = each_layer(model(is_causal=True))
    with regard.Monitor(m, every=1, on_error="raise"), pytest.raises(Exception, match=r"[Gg]raph"):
        m(X)


def test_beside_a_watch_it_is_refused_as_by_the_watch() -> None:
    torch._dynamo.reset()
    m = whole(model(is_causal=True))
    refused = pytest.raises(Exception, match="compile without fullgraph=True to watch")
    with regard.Monitor(m, every=1), refused, regard.watch(m):
        m(X)


def test_parts_that_do_not_attend_may_be_one_graph() -> None:
    torch._dynamo.reset()
    m = nn.Sequential(model(is_causal=True), whole(nn.Sequential(nn.Linear(16, 16), nn.ReLU())))
    with regard.Monitor(m, every=1, rules=(), on_error="raise") as monitor:
        m(X).square().mean().backward()
        report = monitor.step()
    assert report is not None
    assert list(report.layers) == ["0.layers.0", "0.layers.1"]
