"""Launches that were recorded, as steps that are made again: the same kernels, with the addresses
of other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.backends.triton.captures import capturing, hold
from regard.backends.triton.launches.binaries import MAP, Loaded, clear
from regard.backends.triton.launches.cuda_driver import Grid
from regard.backends.triton.launches.launched import (
    ByTriton,
    Directly,
    One,
    current_stream,
    maps_in,
    tensors_in,
)
from regard.backends.triton.pairs import Seed
from regard.backends.triton.rules import Rule

_EMPTY: Any = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None
)
"""Fresh memory on the current GPU, as PyTorch's compiler has its programs ask for it: in half the
time. It is private to PyTorch."""


_SEED = -1
"""In the place of a tensor's number: the seed comes last."""


class Address(NamedTuple):
    """A parameter that is the address of a tensor plus some bytes; or dropout's seed."""

    parameter: int
    tensor: int
    offset: int


class Map(NamedTuple):
    """A parameter that is the tensor map of a tensor, for TMA."""

    parameter: int
    tensor: int
    number: int
    """Its index among the tensor maps of the kernel."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Step(NamedTuple):
    """One launch: its parameters, and which of them are addresses to replace."""

    loaded: Loaded
    grid: Grid
    values: list[Any]
    addresses: list[Address]
    maps: list[Map]
    held: list[object]
    """Lists of a mask's tiles, and tensors beside q, k and v: they lie where the values say as long
    as they are kept."""

    def packed(self) -> Step:
        """The same, with all that stays packed once. Tensor maps stay but for the address that
        they begin with, if they do."""
        found = list(self.addresses)
        for parameter, tensor, number, shape, strides in self.maps:
            if self.loaded.maps_of(number, shape, strides).rest is None:
                return self
            found.append(Address(parameter, tensor, 0))
        found.sort()
        loaded, values, places = self.loaded.holding(self.values, [a.parameter for a in found])
        addresses = [a._replace(parameter=at) for a, at in zip(found, places, strict=True)]
        return Step(loaded, self.grid, values, addresses, [], self.held)

    def launch(self, stream: int, tensors: list[int]) -> None:
        loaded, grid, values, addresses, maps, held = self
        if held and capturing():
            hold(held)
        values = values.copy()
        for parameter, tensor, offset in addresses:
            values[parameter] = tensors[tensor] + offset
        for parameter, tensor, number, shape, strides in maps:
            values[parameter] = loaded.map_of(number, tensors[tensor], shape, strides)
        loaded(grid, stream, values)


class Fresh(NamedTuple):
    """Memory that is allocated anew for each pass."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    zero: bool
    nothing: Tensor | None
    """In place of statistics that were not asked for: one empty tensor for all."""

    @staticmethod
    def like(t: Tensor, *, zero: bool = False) -> Fresh:
        return Fresh(tuple(t.shape), t.stride(), t.dtype, zero, None if t.numel() else t)


def made(parts: Sequence[Fresh | None], device: torch.device) -> list[Tensor | None]:
    """Memory for a pass, on the current GPU or on a CPU."""
    on_cuda = device.type == "cuda"
    # Where memory is to be filled before it is written to, PyTorch's own function does so.
    quick = on_cuda and not torch.are_deterministic_algorithms_enabled()
    found: list[Tensor | None] = []
    for part in parts:
        if part is None:
            found.append(None)
            continue
        shape, strides, dtype, zero, nothing = part
        if nothing is not None:
            found.append(nothing)
        elif zero and not on_cuda:
            found.append(torch.zeros(shape, dtype=dtype, device=device))
        elif quick and _EMPTY is not None:
            found.append(_EMPTY(shape, strides, dtype))
        else:
            found.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
        if zero and on_cuda:
            fresh = found[-1]
            assert fresh is not None
            clear(fresh.data_ptr(), fresh.nbytes, current_stream())
    return found


def launch_again(
    steps: list[Step], tensors: Sequence[Tensor | None], seed: int | None = None
) -> None:
    """The same launches, for tensors in the order in which `steps_of` was given them."""
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    if seed is not None:
        addresses.append(seed)
    stream = current_stream()
    for step in steps:
        step.launch(stream, addresses)


def steps_of(
    launches: list[tuple[Directly | ByTriton, One]],
    given: Sequence[Tensor | None],
    memory: Sequence[Tensor | None],
    lasting: Sequence[Tensor] = (),
) -> list[Step] | None:
    """Launches as steps; None where one takes a tensor that the next call will not have: also one
    that is there only once a CUDA graph is replayed. Those that last are the same in each call."""
    tensors = [*given, *memory]
    steps = [_step(done, one, tensors, len(given), lasting) for done, one in launches]
    whole = [step for step in steps if step is not None]
    if any(step.held for step in whole) and capturing():
        return None
    return whole if steps and len(whole) == len(steps) else None


def _step(
    done: Directly | ByTriton,
    one: One,
    tensors: list[Tensor | None],
    given: int,
    lasting: Sequence[Tensor],
) -> Step | None:
    if not isinstance(done, Directly):
        return None
    loaded = done.loaded
    taken, described = tensors_in(one.arguments), maps_in(one.arguments)
    held: list[object] = [
        part for part in one.arguments if isinstance(part, Rule) and [*tensors_in(part)]
    ]
    taken_here = {id(t) for t in tensors_in(one.arguments)}
    held += [t for t in lasting if id(t) in taken_here]
    stay = {id(t) for part in held for t in tensors_in((part,))}
    addresses: list[Address] = []
    maps: list[Map] = []
    for parameter, kind in enumerate(loaded.binary.takes):
        if kind not in ("*", MAP):
            continue
        tensor = next(taken)
        layout = next(described) if kind == MAP else None
        # What is held is kept with the launch.
        if id(tensor) in stay or not tensor.numel():
            continue
        whose = _owner(tensor, tensors, given)
        if whose is None:
            return None
        owner = tensors[whose]
        assert owner is not None
        if layout is not None:
            shape, strides = tuple(layout.shape), tuple(layout.strides)
            maps.append(Map(parameter, whose, len(maps), shape, strides))
        else:
            addresses.append(Address(parameter, whose, tensor.data_ptr() - owner.data_ptr()))
    values = done.expanded(one.values)
    addresses += [Address(i, _SEED, 0) for i, value in enumerate(values) if type(value) is Seed]
    return Step(loaded, one.grid, values, addresses, maps, held).packed()


def _owner(tensor: Tensor, tensors: list[Tensor | None], given: int) -> int | None:
    """Which of some tensors it is, or is a part of. Those that are given are compared as objects,
    since several may share memory."""
    for i, t in enumerate(tensors[:given]):
        if tensor is t:
            return i
    memory = tensor.untyped_storage().data_ptr()
    for i, t in enumerate(tensors[given:], given):
        if t is not None and t.numel() and t.untyped_storage().data_ptr() == memory:
            return i
    return None
