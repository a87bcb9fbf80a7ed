"""A forward pass again, for other tensors of the same shapes: fresh memory, and the same launches
with other addresses. Everything that was decided, checked and looked up for the first is kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.triton.binaries import MAP, Loaded
from regard.backends.triton.cuda_driver import Grid
from regard.backends.triton.forward import Memory, launch, memory_for, run
from regard.backends.triton.launching import (
    ByTriton,
    Directly,
    One,
    current_stream,
    recorded,
    tensors_in,
)
from regard.backends.triton.layout import rule_of
from regard.backends.triton.rules import Rule
from regard.backends.triton.tuning import forward_settings
from regard.inputs import AttentionInputs


class Address(NamedTuple):
    """A parameter that is the address of a tensor, some bytes on."""

    parameter: int
    tensor: int
    offset: int


class Map(NamedTuple):
    """A parameter that is the map of a tensor."""

    parameter: int
    tensor: int
    number: int
    """Among the maps of the kernel."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Step(NamedTuple):
    """One launch: all it takes, and where addresses of other tensors go."""

    loaded: Loaded
    grid: Grid
    values: list[Any]
    addresses: list[Address]
    maps: list[Map]

    def launch(self, stream: int, tensors: list[int]) -> None:
        values = self.values.copy()
        for parameter, tensor, offset in self.addresses:
            values[parameter] = tensors[tensor] + offset
        for parameter, tensor, number, shape, strides in self.maps:
            values[parameter] = self.loaded.map_of(number, tensors[tensor], shape, strides)
        self.loaded(self.grid, stream, values)


class Fresh(NamedTuple):
    """Memory that each pass has its own of."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    zero: bool


class Replay:
    """The forward pass of one kind of call."""

    def __init__(self, fresh: list[Fresh | None], steps: list[Step], rule: Rule) -> None:
        self.fresh = fresh
        self.steps = steps
        self.rule = rule
        """Its tensors are read by the launches."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Rows, Tensor]:
        device = q.device
        memory = [None if part is None else _made(part, device) for part in self.fresh]
        addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
        addresses += [0 if part is None else part.data_ptr() for part in memory]
        stream = current_stream()
        for step in self.steps:
            step.launch(stream, addresses)
        to = Memory(*memory)  # type: ignore[arg-type]
        return Rows(to.out, to.lse, to.largest, to.entropy), to.norm


def first(x: AttentionInputs, *, statistics: bool) -> tuple[tuple[Rows, Tensor], Replay | None]:
    """A forward pass, and how to do it again: None where that takes more than other addresses."""
    how = forward_settings(x, statistics=statistics)
    if how.cudnn:
        return run(x, how, statistics=statistics), None
    rule = rule_of(x.mask, x.shape, (how.rows, how.keys), x.q.device, by_keys=False)
    to = memory_for(x, how, rule, statistics=statistics)
    with recorded() as launches:
        launch(x, how, rule, to, statistics=statistics)
    fresh = [
        None
        if t is None
        else Fresh(tuple(t.shape), t.stride(), t.dtype, how.hopper and t is to.marks)
        for t in to
    ]
    given: list[Tensor | None] = [x.q, x.k, x.v, *to]
    steps = [_step(done, one, given, rule) for done, one in launches]
    whole = [step for step in steps if step is not None]
    replay = Replay(fresh, whole, rule) if steps and len(whole) == len(steps) else None
    return (Rows(to.out, to.lse, to.largest, to.entropy), to.norm), replay


def _step(
    done: Directly | ByTriton, one: One, given: list[Tensor | None], rule: Rule
) -> Step | None:
    if not isinstance(done, Directly):
        return None
    loaded = done.loaded
    values = done.expanded(one.values)
    addresses: list[Address] = []
    maps: list[Map] = []
    tensors = tensors_in(one.arguments)
    constant = set(map(id, tensors_in(rule)))
    for parameter, kind in enumerate(loaded.binary.takes):
        if kind not in ("*", MAP):
            continue
        tensor = next(tensors)
        if id(tensor) in constant or not tensor.numel():
            continue
        whose = _owner(tensor, given)
        if whose is None:
            return None
        owner = given[whose]
        assert owner is not None
        if kind == MAP:
            shape, strides = tuple(tensor.shape), tuple(tensor.stride())
            maps.append(Map(parameter, whose, len(maps), shape, strides))
        else:
            addresses.append(Address(parameter, whose, tensor.data_ptr() - owner.data_ptr()))
    return Step(loaded, one.grid, values, addresses, maps)


def _owner(tensor: Tensor, given: list[Tensor | None]) -> int | None:
    """Which of the given tensors it is, or is a part of: the call's own are known by what they
    are, since several may be one in memory."""
    for i, t in enumerate(given[:3]):
        if tensor is t:
            return i
    memory = tensor.untyped_storage().data_ptr()
    for i, t in enumerate(given[3:], 3):
        if t is not None and t.numel() and t.untyped_storage().data_ptr() == memory:
            return i
    return None


def _made(part: Fresh, device: torch.device) -> Tensor:
    if part.zero:
        return torch.zeros(part.shape, dtype=part.dtype, device=device)
    return torch.empty_strided(part.shape, part.strides, dtype=part.dtype, device=device)
