"""What is kept of a call while a CUDA graph is captured, and what a graph holds on to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from regard import masks
from regard.backends.contract import Rows
from regard.backends.passes import Pull
from regard.backends.triton import captures, layout, operators
from regard.backends.triton.layout import rule_of
from regard.backends.triton.operators import _passes
from regard.backends.triton.pairs import INTERPRETED
from regard.backends.triton.replay.passes import RepeatedBackward, RepeatedForward
from regard.backends.triton.rules import Rule
from regard.inputs import AttentionInputs
from regard.values import Shape
from tests.backends.triton.replay.test_replay import Made, inputs, made, tensors

__all__ = ["made"]
pytestmark = pytest.mark.skipif(INTERPRETED.value, reason="interpreted kernels are not launched")

LISTED = masks.dilated(3)
SHAPE, TILE, CPU = Shape(2, 4, 200, 200), (64, 64), torch.device("cpu")


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Say that a graph is being captured, or that it is no longer."""
    monkeypatch.setattr(captures, "_HELD", [])
    monkeypatch.setattr(layout, "_MADE", layout._Store(room=2))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def capture(on: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: on)

    capture(False)
    return capture


def rule(mask: masks.Mask = LISTED) -> Rule:
    bound = inputs(*tensors(0), mask).mask
    return rule_of(bound, SHAPE, TILE, CPU, by_keys=False)


def test_lists_made_meanwhile_are_not_kept(graph: Callable[[bool], None]) -> None:
    graph(True)
    meanwhile = rule()
    graph(False)
    assert rule() is not meanwhile
    assert rule() is rule()


def test_lists_that_a_graph_reads_outlive_others(graph: Callable[[bool], None]) -> None:
    lost = weakref.ref(rule().lists.full)
    rule(masks.dilated(4)), rule(masks.dilated(5)), rule(masks.dilated(6))
    assert lost() is None
    read = weakref.ref(rule().lists.full)
    graph(True)
    rule()
    graph(False)
    rule(masks.dilated(4)), rule(masks.dilated(5)), rule(masks.dilated(6))
    assert read() is not None


@pytest.mark.parametrize("mask", [masks.causal(), LISTED], ids=["numbers", "lists"])
def test_launches_made_meanwhile(
    made: Made, graph: Callable[[bool], None], mask: masks.Mask
) -> None:
    """They are replayed if they read nothing but the tensors of the call."""
    x = inputs(*tensors(0), mask)
    attend, pull = RepeatedForward(_passes, x.beside_tensors(), True), RepeatedBackward(_passes)
    graph(True)
    for _ in range(2):
        rows, kept = attend(x.q, x.k, x.v)
        pull(x, rows, kept, Pull(torch.ones_like(rows.out), None, None))
    assert (attend.replay is None) == (len(pull.known) == 0) == (mask is LISTED)
    graph(False)
    for _ in range(2):
        rows, kept = attend(x.q, x.k, x.v)
        pull(x, rows, kept, Pull(torch.ones_like(rows.out), None, None))
    assert attend.replay is not None
    assert all(known is not None for known in pull.known.values())


def test_a_graph_holds_the_lists_of_launches_that_it_replays(
    made: Made, graph: Callable[[bool], None]
) -> None:
    x = inputs(*tensors(0), LISTED)
    for captured in (False, True):
        attend = RepeatedForward(_passes, x.beside_tensors(), True)
        attend(x.q, x.k, x.v)
        layout._MADE.held.clear()
        assert attend.replay is not None
        read = weakref.ref(attend.replay[1][0].held[0].lists.full)
        graph(captured)
        attend(x.q, x.k, x.v)
        graph(False)
        del attend
        assert (read() is not None) == captured


def test_nothing_is_held_twice(graph: Callable[[bool], None]) -> None:
    found = rule()
    graph(True)
    assert rule() is found
    held = len(captures._HELD)
    assert rule() is found
    assert len(captures._HELD) == held > 0


@pytest.mark.parametrize(
    ("mask", "reads"), [(masks.causal(), False), (masks.prefix(5), False), (LISTED, True)]
)
def test_lists_are_left_out_of_the_graphs_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch, mask: masks.Mask, reads: bool
) -> None:
    """They are kept, and memory of such a graph is taken back when it ends."""
    taken: list[str] = []

    def run(name: str, x: AttentionInputs, *, statistics: bool) -> Rows:
        taken.append(name)
        return Rows(*(x.q for _ in Rows._fields))

    for name in ("_run", "_run_listed"):
        monkeypatch.setattr(operators, name, partial(run, name))
    operators.run(inputs(*tensors(0), mask), statistics=True)
    assert taken == ["_run_listed" if reads else "_run"]
