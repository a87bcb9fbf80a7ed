"""Calls of a training step that are looked at once the forward pass is over.

Looked at one by one, each costs several times what it costs right after another: the model's own
code between them takes the processor's caches. Autograd holds queries, keys and values until the
backward pass anyway, so to hold them until the forward pass is over takes no memory; should it not,
because outputs are dropped or a backward pass is a part of the forward one, it takes `MANY` bytes
at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.calls.watchers import watchers
from regard.transforms import in_forward_mode, recorded, under_torch_func

MANY = 2**28
"""So many bytes of queries, keys and values wait at most."""
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
    versions: tuple[int, ...]
    autocast: tuple[bool, torch.dtype]
    stream: Any

    def unchanged(self) -> bool:
        """Whether its tensors still hold what was attended to."""
        return unchanged((self.query, self.key, self.value), self.versions)

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
    """The calls of one forward pass that wait, in their order.

    `look` looks at those that wait; `missed` is told whose call it is too late to look at."""

    def __init__(self, look: Callable[[], None], missed: Callable[[str], None]) -> None:
        self._look, self._missed = look, missed
        self.wanted = True
        """Whether calls may wait: until one of them was written to."""
        self._calls: list[DeferredCall] = []
        self._held = 0

    def take(
        self, path: str, query: Tensor, key: Tensor, value: Tensor, causal: bool,
        scale: float | None,
    ) -> bool:  # fmt: skip
        """Whether a call waits; else it is to be looked at now."""
        if not (self.wanted and _may_wait(query, key, value)):
            return False
        device = query.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._calls.append(
            DeferredCall(
                path, query.detach(), key.detach(), value.detach(), causal, scale,
                versions(query, key, value), _autocast(device.type), stream,
            )
        )  # fmt: skip
        self._held += query.nbytes + key.nbytes + value.nbytes
        if self._held >= MANY:
            self._look()
        return True

    def taken(self) -> Iterator[DeferredCall]:
        """Those that waited; each is let go of when the next is asked for."""
        self._calls.reverse()
        self._held = 0
        while self._calls:
            yield self._calls.pop()

    def drop(self) -> None:
        """What an interrupt left."""
        self._calls.clear()
        self._held = 0

    def holds(self, call: DeferredCall) -> bool:
        """Whether a call can still be looked at. If not, that is told, and from now on none
        waits."""
        if not call.unchanged():
            self.miss(call.path)
            return False
        return True

    def miss(self, path: str) -> None:
        """A call waited too long."""
        self.wanted = False
        self._missed(path)


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
        # Autocast, checkpointing and the like hold other things than these tensors.
        and not _is_cast(query, key, value)
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


def versions(*tensors: Tensor) -> tuple[int, ...]:
    """How often tensors were written to, where that is counted."""
    return tuple(0 if t.is_inference() else t._version for t in tensors)


def unchanged(tensors: Sequence[Tensor], before: tuple[int, ...]) -> bool:
    """Whether tensors that had these versions hold what they held. Their memory may be gone:
    sharding frees that of parameters, of which queries may be views, as soon as a layer has run.
    """
    return before == versions(*tensors) and all(
        t.untyped_storage().nbytes() or not t.numel() for t in tensors
    )


def _is_cast(*tensors: Tensor) -> bool:
    """Whether autocast has PyTorch's attention called with copies of tensors."""
    enabled, dtype = _autocast(tensors[0].device.type)
    return enabled and any(t.dtype not in (dtype, torch.float64) for t in tensors)


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
