"""Calls of a training step that are looked at once the forward pass is over.

Looked at one by one, each costs several times what it costs right after another: the model's own
code between them takes the processor's caches. Autograd holds queries, keys and values until the
backward pass anyway, so to hold them until the forward pass is over takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.calls.watchers import watchers
from regard.transforms import in_forward_mode, recorded, under_torch_func

_PLAIN = (Tensor, nn.Parameter)
_top_hooks: Callable[[bool], Any] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)


class DeferredCall(NamedTuple):
    """A call of PyTorch's attention with autograd, without a mask but a causal one."""

    path: str
    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    scale: float | None
    versions: tuple[int, int, int]
    autocast: tuple[bool, torch.dtype]
    stream: Any

    def unchanged(self) -> bool:
        """Whether its tensors still hold what was attended to."""
        return self.versions == _versions(self.query, self.key, self.value)

    def as_it_was_made(self) -> AbstractContextManager[Any]:
        """Autocast and the stream of the call."""
        device, before = self.query.device.type, ExitStack()
        if _autocast(device) != self.autocast:
            enabled, dtype = self.autocast
            before.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        if self.stream is not None and self.stream != torch.cuda.current_stream(self.query.device):
            before.enter_context(torch.cuda.stream(self.stream))
        return before


class DeferredCalls:
    """The calls of one forward pass that wait, in their order."""

    def __init__(self, missed: Callable[[str], None]) -> None:
        self._missed = missed
        self._wanted = True
        self._calls: list[DeferredCall] = []

    def take(
        self, path: str, query: Tensor, key: Tensor, value: Tensor, causal: bool,
        scale: float | None,
    ) -> bool:  # fmt: skip
        """Whether a call waits; else it is to be looked at now."""
        if not (self._wanted and _may_wait(query, key, value)):
            return False
        device = query.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._calls.append(
            DeferredCall(
                path, query.detach(), key.detach(), value.detach(), causal, scale,
                _versions(query, key, value), _autocast(device.type), stream,
            )
        )  # fmt: skip
        return True

    def taken(self) -> Iterator[DeferredCall]:
        """Those that waited; each is let go of when the next is asked for."""
        self._calls.reverse()
        while self._calls:
            yield self._calls.pop()

    def drop(self) -> None:
        """What an interrupt left."""
        self._calls.clear()

    def holds(self, call: DeferredCall) -> bool:
        """Whether a call can still be looked at. If not, that is told, and from now on none
        waits."""
        if not call.unchanged():
            self._wanted = False
            self._missed(call.path)
            return False
        return True


def _may_wait(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether autograd holds these tensors, nobody but one watcher is shown the call, and nothing
    is at work that will have changed when the forward pass is over."""
    return (
        torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
        and type(query) in _PLAIN
        and type(key) in _PLAIN
        and type(value) in _PLAIN
        and query.device.type in ("cpu", "cuda")
        # Checkpointing and the like hold other things than these tensors.
        and _top_hooks is not None
        and _top_hooks(True) is None
        and len(watchers.get()) == 1
        and torch._C._current_graph_task_id() == -1
        and not under_torch_func()
        and not in_forward_mode()
        and not recorded()
        and torch._C._len_torch_dispatch_stack() == 0
        and not (query.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _versions(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int, int]:
    return query._version, key._version, value._version


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
