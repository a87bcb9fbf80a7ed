"""What watching may not leave behind: in a model, in a thread, in the process."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import _get_current_function_mode_stack

from regard.calls import watchers
from regard.watching import followed_run
from regard.watching.flex import calls as flex_calls
from regard.watching.pytorch.looking import looking

_sdpa, _multi_head = F.scaled_dot_product_attention, F.multi_head_attention_forward
_flex_code, _flex_defaults = flex_attention.__code__, flex_attention.__defaults__


def nothing_in_the_thread() -> None:
    """Asserts that this thread is as if nobody had watched in it; others may still."""
    assert _get_current_function_mode_stack() == []
    assert torch._C._is_torch_function_enabled()
    assert watchers.watchers.get() == ()
    assert watchers.caller.get() is None
    assert watchers.gives_turned.get() is False
    assert followed_run._HERE.get() == ()
    assert looking.get() is False
    shared: Any = sys.modules.get("regard.watching.huggingface.shared_values")
    assert shared is None or shared.made_in_run.get() is None


def nothing_in_the_process() -> None:
    """Asserts that this thread and the process are as if nobody had watched."""
    nothing_in_the_thread()
    assert F.scaled_dot_product_attention is _sdpa
    assert F.multi_head_attention_forward is _multi_head
    assert flex_attention.__code__ is _flex_code
    assert flex_attention.__defaults__ == _flex_defaults
    assert not hasattr(flex_attention, "_torchdynamo_disable")
    assert flex_calls._watching == []
    switch: Any = sys.modules.get("regard.watching.huggingface.switch")
    assert switch is None or switch.switched == {}


def nothing_in(model: nn.Module) -> None:
    """Asserts that a model is as if it had never been watched."""
    for path, module in model.named_modules():
        names = ("_compiled_call_impl", "__getstate__", "_replicate_for_data_parallel")
        assert not {*names, "prepare_inputs_for_generation"} & vars(module).keys(), path
        assert not module._forward_hooks, path
        assert not module._forward_pre_hooks, path
        config = getattr(module, "config", None)
        assert getattr(config, "_attn_implementation", None) != "regard_watching", path


def threads() -> set[str]:
    """Those that run, less one that draws the progress bars of others."""
    return {thread.name for thread in threading.enumerate()} - {"tqdm_monitor"}
