"""Triton's interpreter, made quicker for the many small kernels that the tests run.

It swaps the language's functions for its own at every call of a function inside a kernel, though
the launch has done so; that is a third of its time. Here a launch swaps them once. Most of the rest
goes into types: each operation makes several, with their shapes and names. Here a shape is made
once, and tensors share it. What kernels compute stays as it is.
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
    _share_types()


def _looked_up_once(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """It makes a table of all types each time it is asked for one."""
    from triton.language import block_type, pointer_type

    known = functools.cache(find)

    def look_up(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, block_type) else dtype
        return find(scalar) if isinstance(scalar, pointer_type) else known(scalar)

    return look_up


def _share_types() -> None:
    """One shape and name for all types that have them, found instead of made."""
    from triton.language import core, semantic

    block, tensor, Number = core.block_type, core.tensor, core.constexpr
    make_block, make_tensor = block.__init__, tensor.__init__
    unwrap, same, broadcast = (
        core._unwrap_if_constexpr, core.dtype.__eq__, semantic.TritonSemantic.broadcast_impl_value,
    )  # fmt: skip
    shapes: dict[Any, Any] = {}
    blocks: dict[Any, Any] = {}
    tensors: dict[int, Any] = {}
    bare = {bool, int, float, str, type(None), tensor, core.dtype, block, core.pointer_type}
    integers = {*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES}

    def unwrapped(o: Any) -> Any:
        kind = type(o)
        return o.value if kind is Number else o if kind in bare else unwrap(o)

    def block_of(self: Any, element_ty: Any, shape: Any) -> None:
        axes = tuple([unwrapped(n) for n in shape])
        found = blocks.get((axes, element_ty.name))
        if found is None:
            make_block(self, element_ty, shape)
            self.shape = shapes.setdefault(axes, self.shape)
            blocks[axes, element_ty.name] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = found

    def tensor_of(self: Any, handle: Any, type: Any) -> None:
        # Shapes of blocks are kept, so that no other is ever found at their place in memory.
        place = id(type.shape) if type.is_block() else 0
        found = tensors.get(place)
        if found is None:
            make_tensor(self, handle, type)
            tensors[place] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = found

    def alike(self: Any, other: Any) -> Any:
        return self is other or same(self, other)

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core._unwrap_if_constexpr = unwrapped
    block.__init__, tensor.__init__, core.dtype.__eq__ = block_of, tensor_of, alike
    core.dtype.is_int = lambda self: self.name in integers
    semantic.TritonSemantic.broadcast_impl_value = broadcasted
