"""Functions that torch.compile does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])

# `torch.compiler.disable` would import the compiler, which takes longer than importing PyTorch.
_skip = eval_frame._FrameAction.SKIP
_whole = eval_frame._FrameExecStrategy(_skip, _skip)
_alone = eval_frame._FrameExecStrategy(_skip, eval_frame._FrameAction.DEFAULT)


def between_graphs(why: str) -> Callable[[F], F]:
    """A function that runs between graphs, with all that it calls; `why` is the compiler's error
    under fullgraph=True."""

    def mark(function: F) -> F:
        eval_frame.set_code_exec_strategy(function.__code__, _whole)
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
        return function

    return mark


def inlined(function: F) -> F:
    """A function that is compiled as a part of what calls it, and never by itself."""
    eval_frame.set_code_exec_strategy(function.__code__, _alone)
    return function
