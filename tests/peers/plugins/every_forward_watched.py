"""A pytest plugin that watches every call of a transformers model, and looks at what was seen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import outcome_file
import pytest
import torch
from transformers import GenerationMixin, PreTrainedModel

import regard

_watched: list[PreTrainedModel] = []
_held: list[regard.watching.Watch] = []
"""Watches that last until a test ends: what is checkpointed runs again in its backward pass."""
_traces = 0


def _with_a_watch(called: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(called)
    def watched(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        models = [*_watched, *(watch.model for watch in _held)]
        seen_already = any(self is part for model in models for part in model.modules())
        # In a graph that is being made, the watch would be part of the graph.
        if seen_already or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return called(self, *args, **kwargs)
        watch = regard.watch(self, keep="traces")
        if self.training and self.is_gradient_checkpointing:
            watch.attach()
            _held.append(watch)
            return called(self, *args, **kwargs)
        _watched.append(self)
        try:
            with watch as seen:
                out = called(self, *args, **kwargs)
        finally:
            _watched.pop()
        _look_at(seen)
        return out

    return watched


def pytest_runtest_teardown(item: pytest.Item) -> None:
    while _held:
        watch = _held.pop()
        watch.detach()
        _look_at(watch.seen)


@torch.no_grad()
def _look_at(seen: regard.watching.Seen) -> None:
    for layer in seen.values():
        for trace in layer.traces:
            _check(trace)


def _check(trace: regard.Trace) -> None:
    """What holds of any attention: weights are shares of one whole."""
    global _traces
    _traces += 1
    if trace.lse.device.type == "meta" or trace.lse.isnan().any():
        return
    sums = trace.weights().float().sum(-1)
    assert sums.max() <= 1.01, f"weights of a row add up to {sums.max().item()}: {trace}"
    if trace.inputs.sink is None:
        whole = trace.lse > -torch.inf
        assert sums[whole].min() >= 0.99 if whole.any() else True, f"weights are missing: {trace}"
    assert trace.entropy.min() >= -1e-3, f"an entropy is negative: {trace}"


PreTrainedModel.__call__ = _with_a_watch(PreTrainedModel.__call__)
GenerationMixin.generate = _with_a_watch(GenerationMixin.generate)


def pytest_sessionfinish(session: pytest.Session) -> None:
    outcome_file.write(traces=_traces)
