"""A pytest plugin that watches every call of a transformers model, and looks at what was seen.

What is compared in a test is watched on both sides: that the watch changes nothing is seen by
calling once more without it.
"""

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
_outputs = 0
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


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
        if called is _forward and not self.training and kwargs.get("past_key_values") is None:
            _compare(self, args, kwargs, out)
        return out

    return watched


def _compare(model: PreTrainedModel, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    """The output is that of the same call without a watch."""
    global _outputs
    _watched.append(model)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            plain = _forward(model, *args, **kwargs)
    finally:
        _watched.pop()
    named = (kwargs.get(f"{of}attention_mask") for of in ("", "decoder_"))
    padded = [seen for seen in named if seen is not None and seen.ndim == 2 and not seen.all()]
    for name in ("last_hidden_state", "logits"):
        ours, theirs = getattr(out, name, None), getattr(plain, name, None)
        if not isinstance(ours, torch.Tensor) or ours.device.type == "meta":
            continue
        # What a row that may see nothing gives is arbitrary: those of padding.
        if padded and (ours.ndim != 3 or any(seen.shape != ours.shape[:2] for seen in padded)):
            continue
        for seen in padded:
            ours, theirs = (t.masked_fill(~seen.bool()[..., None], 0) for t in (ours, theirs))
        close = _CLOSE[ours.dtype]
        torch.testing.assert_close(
            ours, theirs, rtol=close, atol=close, equal_nan=True,
            msg=lambda said, name=name: f"watched, {name} is another: {said}",
        )  # fmt: skip
        _outputs += 1


def pytest_runtest_teardown(item: pytest.Item) -> None:
    while _held:
        watch = _held.pop()
        watch.detach()
        _look_at(watch.seen)


@torch.no_grad()
def _look_at(seen: regard.seen.Seen) -> None:
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


_forward = PreTrainedModel.__call__
PreTrainedModel.__call__ = _with_a_watch(_forward)
GenerationMixin.generate = _with_a_watch(GenerationMixin.generate)


def pytest_sessionfinish(session: pytest.Session) -> None:
    outcome_file.write(traces=_traces, outputs=_outputs)
