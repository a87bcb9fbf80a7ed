"""JSON that every reader takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite_or_null(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: None replaces them.

    >>> finite_or_null({"loss": [0.5, float("nan")], "steps": (1, 2)})
    {'loss': [0.5, None], 'steps': [1, 2]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite_or_null(part) for name, part in value.items()}
    return [finite_or_null(part) for part in value] if isinstance(value, (tuple, list)) else value
