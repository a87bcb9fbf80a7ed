"""Where in somebody's code a function of PyTorch was called."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_WRAPPERS = ("einops", "jaxtyping", "beartype", "typeguard")
_PASSED_OVER = (
    _OURS,
    _TORCH,
    "<frozen",
    "<eval_with_key>",
    "<@",
    *(f"{os.sep}{name}{os.sep}" for name in _WRAPPERS),
)


def call_site() -> str:
    """file:line of the innermost code that is neither PyTorch's nor ours, nor wraps other code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in _PASSED_OVER):
            return f"{_short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _short(file: str) -> str:
    """From where the program was started, if it is below."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
