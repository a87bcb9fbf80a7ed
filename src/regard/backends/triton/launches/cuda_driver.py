"""The few functions of the CUDA driver that load and launch a kernel.

Triton's own launcher is C that it compiles for each kernel: one more compilation on a first call,
and a loop over all arguments on each. The driver knows the parameters of a kernel; with all of them
in one buffer, a launch is one call of C.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

from regard.errors import RegardError

INVALID_CONTEXT = 201
_DYNAMIC_SHARED = 8
_PREFER_SHARED = 1
_LARGEST = 32_764
"""Bytes that all parameters of a kernel take at most, on any GPU."""


class Parameter(NamedTuple):
    """Offset and size of a parameter, in bytes."""

    offset: int
    size: int


@cache
def _cuda() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number, word = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
    library.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    library.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    library.cuFuncSetCacheConfig.argtypes = [pointer, ctypes.c_int]
    library.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    library.cuFuncGetParamInfo.argtypes = [pointer, word, pointer, pointer]
    library.cuLaunchKernelEx.argtypes = [pointer] * 4
    library.cuMemsetD8Async.argtypes = [pointer, ctypes.c_ubyte, word, pointer]
    how = [ctypes.c_int] * 4
    library.cuTensorMapEncodeTiled.argtypes = [pointer, ctypes.c_int, number, *[pointer] * 5, *how]
    return library


def available() -> bool:
    """Whether there is a driver that reports the parameters of a kernel (CUDA 12.4 and later)."""
    try:
        return hasattr(_cuda(), "cuFuncGetParamInfo")
    except OSError:
        return False


def load(binary: bytes, name: str, shared: int) -> int:
    """A kernel of a binary, in the current context, with so many bytes of shared memory."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check("load", _cuda().cuModuleLoadData(ctypes.byref(module), binary))
    found = _cuda().cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    _check("find", found)
    if shared > 48 * 1024:
        _check("size", _cuda().cuFuncSetCacheConfig(function, _PREFER_SHARED))
        _check("size", _cuda().cuFuncSetAttribute(function, _DYNAMIC_SHARED, shared))
    assert function.value is not None
    return function.value


def parameters(function: int) -> list[Parameter]:
    """The parameters of a kernel, as its binary has them."""
    found: list[Parameter] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    where = ctypes.byref(offset), ctypes.byref(size)
    while not _cuda().cuFuncGetParamInfo(function, len(found), *where):
        found.append(Parameter(offset.value, size.value))
    return found


_CONFIGURATION = Struct("=7I4xQQI4x")
"""Programs across, down and deep, threads in three directions, shared memory, stream, attributes
and their number. (Python takes longer to give C eleven arguments than four and these.)"""


class _Memory(threading.local):
    """Where what a launch takes is written, for each thread: the driver reads it before it
    returns."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_LARGEST)
        self.size = ctypes.c_size_t()
        # A buffer's address follows 1, and that of its size 2.
        self.extra = (ctypes.c_void_p * 5)(
            1, ctypes.addressof(self.buffer), 2, ctypes.addressof(self.size), None
        )
        # Aligned as numbers of 8 bytes are.
        self.how = (ctypes.c_uint64 * (_CONFIGURATION.size // 8))()
        addresses = ctypes.addressof(self.how), ctypes.addressof(self.extra)
        self.parts = self.buffer, self.size, self.how, *addresses


_memory = _Memory()


Grid = tuple[int, int, int]


@cache
def _launcher() -> Any:
    return _cuda().cuLaunchKernelEx


def launch(
    function: int, grid: Grid, threads: int, shared: int, stream: int, form: Struct, values: Any
) -> int:
    """Launch with parameters, packed in a form; 0, or what went wrong."""
    buffer, size, how, configuration, extra = _memory.parts
    form.pack_into(buffer, 0, *values)
    size.value = form.size
    _CONFIGURATION.pack_into(how, 0, *grid, threads, 1, 1, shared, stream, 0, 0)
    found: int = _launcher()(configuration, function, None, extra)
    return found


def clear(address: int, size: int, stream: int) -> int:
    """Set so many bytes to 0, in the order of a stream; 0, or what went wrong. (PyTorch takes three
    times as long to launch a kernel that does.)"""
    found: int = _cuda().cuMemsetD8Async(address, 0, size, stream)
    return found


def check_launch(error: int) -> None:
    _check("launch", error)


class Tiling(NamedTuple):
    """How TMA reads a tensor: in boxes, swizzled in shared memory."""

    swizzle: int
    element: int
    """Its type, as the driver numbers types."""
    bytes: int
    box: tuple[int, ...]


def tensor_map(
    address: int, tiling: Tiling, shape: tuple[int, ...], strides: tuple[int, ...]
) -> bytes:
    """The tensor map of a tensor, for TMA. Positions outside of it are read as 0."""
    rank = len(shape)
    # The driver wants 64 bytes of alignment for what it writes.
    room = ctypes.create_string_buffer(128 + 64)
    start = -ctypes.addressof(room) % 64
    found = _cuda().cuTensorMapEncodeTiled(
        ctypes.addressof(room) + start, tiling.element, rank, address,
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * rank)(*(s * tiling.bytes for s in reversed(strides[:-1])), 0),
        (ctypes.c_uint32 * rank)(*reversed(tiling.box)), (ctypes.c_uint32 * rank)(*[1] * rank),
        0, tiling.swizzle, 2, 0,
    )  # fmt: skip
    _check("describe a tensor to", found)
    return room.raw[start : start + 128]


def _check(what: str, error: int) -> None:
    if error:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(error, ctypes.byref(text))
        message = (text.value or b"unknown error").decode()
        raise RegardError(f"CUDA could not {what} a kernel", got=f"{message} (error {error})")
