"""What the compiler is to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])

WHY = "regard.watch looks at attention between graphs: compile without fullgraph=True to watch"

# `torch.compiler.disable` would import the compiler, which takes longer than importing PyTorch.
_skip = eval_frame._FrameAction.SKIP
_whole = eval_frame._FrameExecStrategy(_skip, _skip)
_frame = eval_frame._FrameExecStrategy(_skip, eval_frame._FrameAction.DEFAULT)


def uncompiled(function: F) -> F:
    """A function that runs between graphs, with all that it calls."""
    eval_frame.set_code_exec_strategy(function.__code__, _whole)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = WHY  # type: ignore[attr-defined]
    return function


def stepped_over(function: F) -> F:
    """A function that runs between graphs, while what it calls may be compiled."""
    eval_frame.set_code_exec_strategy(function.__code__, _frame)
    return function
