"""Launching kernels without Triton's inspection of every argument.

Triton specialises a kernel for every number that is 1 or divisible by 16, and inspects all of them
before each launch. Here a kernel is compiled for what changes its code: types, constants, and the
alignment of strides and addresses. Lengths, heads, windows and the like are not specialised, so
that another length compiles nothing.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from regard.backends.triton.arguments import capability
from regard.backends.triton.launches import cuda_driver, shipped
from regard.backends.triton.launches.assembler import without_faults
from regard.backends.triton.launches.binaries import Loaded, load, taken_from
from regard.backends.triton.launches.cuda_driver import Grid
from regard.backends.triton.pairs import INTERPRETED, Seed
from regard.notices import notice

STRIDES = frozenset(("batch", "head", "row", "query", "key"))
"""Fields of arguments that are strides. Of these the compiler is told whether they are 1 or
divisible by 16, so that it vectorises loads."""
_SAYS_NOTHING, _DIVIDES = 7, 16
_LONG = 1 << 40
_INT32 = 1 << 31

SLOW = 1.0
"""Seconds after which it is said that a kernel is being compiled."""


def current_stream() -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    return stream


def _with_maps(loaded: Loaded, values: list[Any]) -> list[Any]:
    """The arguments of a kernel, with a tensor map in place of each tensor that TMA reads."""
    found: list[Any] = []
    maps = 0
    for value in values:
        if hasattr(value, "block_shape"):
            shape, strides = tuple(value.shape), tuple(value.strides)
            found.append(loaded.map_of(maps, value.base.data_ptr(), shape, strides))
            found += shape
            found += strides
            maps += 1
        else:
            found.append(value)
    return found


class Directly(NamedTuple):
    """A kernel launched by the driver."""

    loaded: Loaded

    def __call__(self, grid: Grid, values: list[Any], arguments: tuple[Any, ...]) -> None:
        self.loaded(grid, current_stream(), self.expanded(values))

    def expanded(self, values: list[Any]) -> list[Any]:
        """All arguments of the kernel, with the tensor map of each tensor that TMA reads."""
        return _with_maps(self.loaded, values) if self.loaded.binary.tilings else values


class ByTriton(NamedTuple):
    """A kernel whose parameters are not known here: Triton launches it."""

    compiled: Any
    rest: list[Any]

    def __call__(self, grid: Grid, values: list[Any], arguments: tuple[Any, ...]) -> None:
        self.compiled[grid](*arguments, *self.rest)


class One(NamedTuple):
    """One launch."""

    of: Any
    """The kernel, as it is launched."""
    key: Any
    grid: Grid
    values: list[Any]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    awaited: Future[Any] | None


class Launched:
    """A kernel, launched as Triton's own are: `kernel[grid](*arguments, **constants)`."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.names = tuple(inspect.signature(kernel.fn).parameters)
        self._known: dict[Any, Directly | ByTriton] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if _here.collected is not None:
            _here.collected.append((self, arguments, constants))
            return
        device = torch.cuda.current_device()
        traits: list[Any] = [device]
        values: list[Any] = []
        _read(arguments, traits, values)
        key = (*traits, *constants.items())
        known = self._known.get(key)
        awaited = None
        if known is None:
            known = self._shipped(key, device, traits, constants)
        if known is None:
            awaited = _compilers().submit(self._compiled, device, arguments, constants)
        across, down, deep = (*grid, 1, 1)[:3]
        one = One(self, key, (across, down, deep), values, arguments, constants, awaited)
        if _here.pending is None:
            self.finish(one)
        elif known is None or _here.pending:
            _here.pending.append(one)
        else:
            self.finish(one)

    def _shipped(
        self, key: Any, device: int, traits: list[Any], constants: dict[str, Any]
    ) -> Directly | None:
        """The kernel that was shipped, if there is one."""
        if not cuda_driver.available():
            return None
        card = capability(torch.device("cuda", device))
        binary = shipped.find(card, self.signature(traits[1:], constants))
        loaded = None if binary is None else load(binary)
        if loaded is None:
            return None
        self._known[key] = found = Directly(loaded)
        return found

    def ready(
        self, device: int, arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> One | None:
        """Have the kernel of a launch compiled, without launching it; None if it was there, else
        what `keep` takes."""
        traits: list[Any] = [device]
        _read(arguments, traits, [])
        key = (*traits, *constants.items())
        if key in self._known or self._shipped(key, device, traits, constants) is not None:
            return None
        awaited = _compilers().submit(self._compiled, device, arguments, constants)
        return One(self, key, (1, 1, 1), [], arguments, constants, awaited)

    def keep(self, one: One) -> Directly | ByTriton:
        """The kernel of a launch, once it is compiled."""
        assert one.awaited is not None
        with _noticed_if_slow(self.kernel.fn.__name__):
            compiled = one.awaited.result()
        known = self._known[one.key] = _loaded(compiled, self.names, one)
        return known

    def signature(self, traits: list[Any], constants: dict[str, Any]) -> str:
        return shipped.signature(self.kernel.fn.__name__, traits, constants)

    def signature_of(self, arguments: tuple[Any, ...], constants: dict[str, Any]) -> str:
        """What a launch is compiled for, as text."""
        traits: list[Any] = []
        _read(arguments, traits, [])
        return self.signature(traits, constants)

    def finish(self, one: One) -> None:
        """Launch, once the kernel is compiled."""
        known = self._known.get(one.key) or self.keep(one)
        known(one.grid, one.values, one.arguments)
        if _here.recorded is not None:
            _here.recorded.append((known, one))

    def _compiled(self, device: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        with torch.cuda.device(device):
            return self.compiled(arguments, constants)

    def compiled(self, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """The kernel, compiled by Triton for all launches like this one."""
        # A fused multiply-add is quicker and more accurate. Triton 3.10 uses it only if asked.
        with without_faults() as options:
            return self.kernel.warmup(
                *map(_neutral, arguments), **constants, **options, grid=(1,), enable_fp_fusion=True
            )


Collected = tuple[Launched, tuple[Any, ...], dict[str, Any]]
"""A kernel, and the arguments and constants that it would be launched with."""


class _Here(threading.local):
    """What this thread does with launches."""

    pending: list[One] | None = None
    """Launches that wait until all their kernels are compiled, side by side."""
    recorded: list[tuple[Directly | ByTriton, One]] | None = None
    collected: list[Collected] | None = None
    """Launches that are recorded instead of made."""


_here = _Here()


@contextmanager
def collected() -> Iterator[list[Collected]]:
    """The launches that would be made inside: kernels, arguments and constants."""
    found: list[Collected] = []
    _here.collected = found
    try:
        yield found
    finally:
        _here.collected = None


@contextmanager
def recorded() -> Iterator[list[tuple[Directly | ByTriton, One]]]:
    """The launches that are made inside."""
    found: list[tuple[Directly | ByTriton, One]] = []
    _here.recorded = found
    try:
        yield found
    finally:
        _here.recorded = None


def launched(kernel: Any) -> Any:
    """A kernel launched this way. (Interpreted ones are run as they are.)"""
    return kernel if INTERPRETED.value else Launched(kernel)


@contextmanager
def together() -> Iterator[None]:
    """Kernels launched inside that are not compiled yet are compiled side by side."""
    outer, _here.pending = _here.pending, []
    try:
        yield
        for one in _here.pending:
            one.of.finish(one)
    finally:
        _here.pending = outer


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4, thread_name_prefix="regard-compiles")


@contextmanager
def _noticed_if_slow(name: str) -> Iterator[None]:
    """Say what takes so long, if it does."""
    line = f"compiling the kernel {name} for this kind of call: some seconds, once"
    timer = threading.Timer(SLOW, notice, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _loaded(compiled: Any, names: tuple[str, ...], one: One) -> Directly | ByTriton:
    binary = taken_from(compiled) if cuda_driver.available() else None
    loaded = None if binary is None else load(binary)
    if loaded is not None:
        return Directly(loaded)
    return ByTriton(compiled, [one.constants[name] for name in names[len(one.arguments) :]])


def tensors_in(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors of a launch, in the order of their addresses and tensor maps."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from tensors_in(argument)
        elif hasattr(argument, "block_shape"):
            yield argument.base


def maps_in(arguments: tuple[Any, ...]) -> Iterator[Any]:
    """What a launch tells the copy engine of tensors, in their order."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from maps_in(argument)
        elif hasattr(argument, "block_shape"):
            yield argument


def _read(arguments: tuple[Any, ...], traits: list[Any], values: list[Any]) -> None:
    """All that a kernel may be specialised for, and its parameters. Most arguments are integers."""
    for argument, is_stride in zip(arguments, _strides_of(type(arguments)), strict=False):
        kind = type(argument)
        if kind is int or kind is Seed:
            if is_stride and argument == 1:
                traits.append(1)
                continue
            aligned = is_stride and argument % 16 == 0
            traits.append((aligned, -_INT32 <= argument < _INT32))
            values.append(argument)
        elif argument is None:
            traits.append(None)
        elif kind is float:
            traits.append(kind)
            values.append(argument)
        elif isinstance(argument, tuple):
            traits.append(kind)
            _read(argument, traits, values)
        elif isinstance(argument, Tensor):
            address = argument.data_ptr()
            traits.append((argument.dtype, address % 16 == 0))
            values.append(address)
        elif kind is tl.constexpr:
            traits.append((kind, argument.value))
        else:
            # A tensor that TMA reads: its memory is aligned, or it could not be one.
            traits.append((kind, argument.base.dtype, tuple(argument.block_shape)))
            values.append(argument)


def _neutral(argument: Any, is_stride: bool = False) -> Any:
    """An argument that makes Triton specialise on what `_read` distinguishes, and on nothing
    else."""
    if isinstance(argument, tuple):
        inside = map(_neutral, argument, _strides_of(type(argument)))
        return type(argument)(*inside) if hasattr(argument, "_fields") else tuple(inside)
    if type(argument) not in (int, Seed) or (is_stride and argument == 1):
        return argument
    said = _DIVIDES if is_stride and argument % 16 == 0 else _SAYS_NOTHING
    return said if -_INT32 <= argument < _INT32 else said + _LONG


@cache
def _strides_of(kind: type) -> Iterable[bool]:
    """Which parts of a tuple are strides."""
    fields = getattr(kind, "_fields", None)
    return repeat(False) if fields is None else tuple(name in STRIDES for name in fields)
