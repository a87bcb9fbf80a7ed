"""PyTorch's own layers, whose functions need not be asked about.

A function mode costs most where there is least to see: in linear layers, norms and activations,
which are half of what a transformer calls, and attend to nothing. So the mode is off while one of
them runs, unless a tensor is followed on its way through attention by hand: a dropout of its
weights, or a norm of its queries, is a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import _has_any_global_hook

from regard.watching.graph_breaks import inlined
from regard.watching.module_calls import OwnCall, changing, own_call
from regard.watching.pytorch.attention_mode import AttentionMode

PLAIN = (
    nn.Linear, nn.Embedding, nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d,
    nn.BatchNorm2d, nn.Conv1d, nn.Conv2d, nn.GELU, nn.ReLU, nn.SiLU, nn.Sigmoid, nn.Tanh,
)  # fmt: skip
"""Layers whose forward calls none of the functions that are looked at."""
_FORWARDS: dict[type, Callable[..., Any]] = {
    kind: kind.forward
    for kind in PLAIN
    if isinstance(kind.forward, FunctionType)
    and kind.forward.__globals__["__name__"].startswith("torch.nn.modules.")
}
"""As PyTorch gave it to each, where nobody put another there."""

_modes = torch._C._len_torch_function_stack
_mode_at = torch._C._get_function_stack_at
_pop = torch._C._pop_torch_function_stack
_push = torch._C._push_on_torch_function_stack


class PlainLayer(OwnCall):
    """The call of such a layer, which turns off the mode that asks about this thread's functions.

    It belongs to no watch: of several each may have a mode on, and other threads have none."""

    def __init__(self, module: nn.Module) -> None:
        self.users = 0
        super().__init__(module)

    # The compiler calls the forward of layers past this; with hooks, or in a compiled function that
    # is one graph, it comes here.
    @inlined
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if is_dynamo_compiling():
            return module._call_impl(*args, **kwargs)
        many = _modes()
        if many:
            mode = _mode_at(many - 1)
            here = module.__dict__
            if (
                type(mode) is AttentionMode
                and not mode.followed
                # A compiled graph has to know of the mode; nor is what follows to be compiled.
                and eval_frame.get_eval_frame_callback() in (None, False)
                and not here["_forward_hooks"]
                and not here["_forward_pre_hooks"]
                and not here["_backward_hooks"]
                and not here["_backward_pre_hooks"]
                and not _has_any_global_hook()
                and "forward" not in here
                and _is_plain(type(module))
                and torch._C._get_tracing_state() is None
            ):
                try:
                    _pop()
                    return module.forward(*args, **kwargs)
                finally:
                    # An interrupt may come before or after it was taken off.
                    if mode.on and _modes() < many:
                        _push(mode)
        return module._call_impl(*args, **kwargs)


def _is_plain(kind: type[nn.Module]) -> bool:
    return kind in _FORWARDS and kind.forward is _FORWARDS[kind]


def spare(module: nn.Module) -> bool:
    """Have a mode turned off while a layer runs, if it is such a layer and nobody follows it or
    compiled it in place. Whether that is so."""
    if not _is_plain(type(module)):
        return False
    with changing:
        own = own_call(module)
        if own is None and module._compiled_call_impl is None:
            own = PlainLayer(module)
        if not isinstance(own, PlainLayer):
            return False
        own.users += 1
    return True


def stop_sparing(module: nn.Module) -> None:
    """The reverse of `spare`."""
    with changing:
        own = own_call(module)
        if isinstance(own, PlainLayer):
            own.users -= 1
            if own.users <= 0:
                own.close()
