"""Scores are computed in their own precision, whatever autocast is about."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def in_full_precision(method: Method) -> Method:
    """A method of (self, inputs, ...) during which autocast is off."""

    @wraps(method)
    def run(self: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        with torch.autocast(inputs.q.device.type, enabled=False):
            return method(self, inputs, *rest, **named)

    return run  # type: ignore[return-value]
