"""What a caller chose to look at, and to keep: layers by patterns of their paths, heads by their
numbers."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from fnmatch import fnmatch
from typing import Any, Literal

from jaxtyping import Int
from torch import Tensor, nn

from regard.arguments import flag
from regard.errors import RegardError
from regard.values import whole
from regard.watching.tokens import reads_two_texts

Layers = str | Collection[str] | None
Heads = int | Sequence[int] | Int[Tensor, "*n"] | None
Keep = Literal["statistics", "traces"]


def check(
    model: Any,
    keep: Any,
    every: int,
    spill: str | os.PathLike[str] | None,
    tokenizer: Any,
    gradients: bool,
) -> None:
    """Say so if a watch is asked for what it cannot do."""
    if not isinstance(model, nn.Module):
        raise RegardError(
            "watch looks at a model", got=type(model).__name__, accepted="a torch.nn.Module"
        )
    if keep not in ("statistics", "traces"):
        raise RegardError(
            "keep= says what to keep of each call",
            got=repr(keep),
            accepted='"statistics" or "traces"',
        )
    if whole("every", every) < 1:
        raise RegardError("every= counts runs of the model", got=str(every), accepted="1 or more")
    flag("gradients", gradients)
    if spill is not None and keep != "traces":
        raise RegardError(
            "spill= is where traces are written", got=f"keep={keep!r}", do='add keep="traces"'
        )
    if gradients and (keep != "traces" or spill is not None):
        given = f"keep={keep!r}" if spill is None else f"spill={os.fspath(spill)!r}"
        raise RegardError(
            "gradients=True keeps traces in the graph of autograd, in memory",
            got=given,
            accepted='keep="traces", without spill=',
            do='add keep="traces"'
            if spill is None
            else "leave spill= out; choose layers= or heads= if memory is short",
        )
    if tokenizer is not None and reads_two_texts(model):
        raise RegardError(
            "tokenizer= is for models that read one text",
            got=f"{type(model).__name__}, which reads one and writes another",
            do="watch without it, and say what the text of interest was: seen.save(tokens=...)",
        )


def patterns(layers: Any) -> tuple[str, ...] | None:
    """Patterns of paths, one or several; None for every layer.

    >>> patterns("layers.1.*")
    ('layers.1.*',)
    """
    if layers is None:
        return None
    named = (layers,) if isinstance(layers, str) else _items(layers)
    if named is None or not all(isinstance(name, str) for name in named):
        raise RegardError(
            "layers= names modules by their paths",
            got=repr(layers),
            accepted="a path or a list of them, with * for any part: 'layers.1.*'",
        )
    return named


def numbers(heads: Any) -> tuple[int, ...] | None:
    """Numbers of heads, one or several; None for every head.

    >>> numbers(3)
    (3,)
    """
    if heads is None:
        return None
    given = (heads,) if _number(heads) is not None else _items(heads)
    chosen = None if given is None else [_number(head) for head in given]
    if chosen is None or None in chosen:
        raise RegardError(
            "heads= are numbers of heads",
            got=repr(heads),
            accepted="a whole number or a list of them, from 0",
        )
    return tuple(head for head in chosen if head is not None)


def matches(path: str, layers: Sequence[str] | None) -> bool:
    return layers is None or any(fnmatch(path, name) for name in layers)


def _items(given: Any) -> tuple[Any, ...] | None:
    """What a list, or anything like it, holds; a tensor may be no list."""
    listed = hasattr(given, "__iter__") and getattr(given, "ndim", 1) > 0
    return tuple(given) if listed and not isinstance(given, bytes) else None


def _number(head: Any) -> int | None:
    whole = hasattr(head, "__index__") and not isinstance(head, bool)
    return head.__index__() if whole and getattr(head, "ndim", 0) == 0 else None
