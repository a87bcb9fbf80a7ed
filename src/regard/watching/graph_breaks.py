"""What the compiler is to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

from regard.between_graphs import between_graphs
from regard.between_graphs import inlined as inlined

F = TypeVar("F", bound=Callable[..., Any])

WHY = "regard.watch looks at attention between graphs: compile without fullgraph=True to watch"

_skip, _default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
_frame = eval_frame._FrameExecStrategy(_skip, _default)


def uncompiled(function: F) -> F:
    """A function that runs between graphs, with all that it calls."""
    return between_graphs(WHY)(function)


def stepped_over(function: F) -> F:
    """A function that runs between graphs, while what it calls may be compiled."""
    eval_frame.set_code_exec_strategy(function.__code__, _frame)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = WHY  # type: ignore[attr-defined]
    return function
