"""Triton's interpreter, made quicker for the many small kernels that the tests run.

It swaps the language's functions for its own at every call of a function inside a kernel, though
the launch has done so; that is a third of its time. Here a launch swaps them once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def quicken() -> None:
    """Let the language stay swapped until a launch ends."""
    from triton.runtime import interpreter

    swap, scopes = interpreter._patch_lang, interpreter._LangPatchScope
    swapped: set[int] = set()

    class Scope(scopes):  # type: ignore[misc, valid-type]
        """What a launch swapped, until it is put back."""

        def __init__(self, own: Any) -> None:
            super().__init__()
            self._changes = own._changes

        def restore(self) -> None:
            super().restore()
            swapped.clear()

    def once(fn: Any) -> Any:
        # Which modules are swapped depends on those that a function's file has imported.
        file = id(fn.__globals__)
        if file in swapped:
            return scopes()
        swapped.add(file)
        return Scope(swap(fn))

    interpreter._patch_lang = once
    # Sums of integers are worked out twice to see whether they overflow, and nothing is said of it
    # unless kernels are debugged.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._get_np_dtype = _looked_up_once(interpreter._get_np_dtype)


def _looked_up_once(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """It makes a table of all types each time it is asked for one."""
    from triton.language import block_type, pointer_type

    known = functools.cache(find)

    def look_up(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, block_type) else dtype
        return find(scalar) if isinstance(scalar, pointer_type) else known(scalar)

    return look_up
