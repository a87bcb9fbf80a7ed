"""A compiled kernel: its binary, and its parameters.

It can be stored, so that one that was compiled elsewhere is launched like one compiled here. Its
parameters are compared with what the binary itself says before its first launch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from regard.backends.triton.launches import cuda_driver
from regard.backends.triton.launches.cuda_driver import Parameter, Tiling
from regard.errors import RegardError

MAP = "map"
"""The type of a parameter that is a tensor map: how TMA reads a tensor."""
_FORMS = {"*": "Q", "i32": "i", "i64": "q", "fp32": "f", MAP: "128s"}
_HIDDEN = 2
"""Addresses of scratch memory that Triton adds behind a kernel's own parameters, at most."""
_MAPS = 256
"""Kinds of tensors, or tensors, whose tensor maps are cached."""
_ADDRESSES, _SOMEWHERE = (1 << 47) - 256, 0x2A5A_5A5A_5A00
"""Addresses end before; one such that every bit differs between it and its opposite."""
# Three types have other numbers on the device than on the host.
_ON_HOST = {8: 10, 9: 8, 10: 9}


class Binary(NamedTuple):
    """A kernel, as Triton or a file gives it."""

    code: bytes
    name: str
    warps: int
    shared: int
    takes: tuple[str, ...]
    """Its parameters: addresses, numbers and tensor maps, each by its type."""
    tilings: tuple[Tiling, ...]
    """How each tensor map reads its tensor."""


def taken_from(compiled: Any) -> Binary | None:
    """What Triton compiled; None if it is launched in a way that is not known here."""
    what = compiled.metadata
    takes: list[str] = []
    _expand(tuple(compiled.src.signature.values()), takes)
    tilings = tuple(
        Tiling(m["swizzle"], _ON_HOST.get(m["elem_type"], m["elem_type"]), m["elem_size"],
               tuple(m["block_size"]))
        for m in getattr(what, "tensordesc_meta", None) or ()
    )  # fmt: skip
    plain = (
        what.num_ctas == 1
        and not getattr(what, "global_scratch_size", 0)
        and not getattr(what, "profile_scratch_size", 0)
        and not getattr(what, "launch_cooperative_grid", False)
        and not getattr(what, "launch_pdl", False)
        and takes.count(MAP) == len(tilings)
        and all(kind in _FORMS for kind in takes)
    )
    if not plain:
        return None
    return Binary(
        compiled.asm["cubin"], what.name, what.num_warps, what.shared, tuple(takes), tilings
    )


def _expand(signature: Any, takes: list[str]) -> None:
    """Types of all parameters. Constants are none; a tensor that TMA reads is its tensor map, its
    lengths and its strides."""
    if isinstance(signature, tuple):
        for part in signature:
            _expand(part, takes)
    elif signature.startswith("tensordesc"):
        rank = signature[: signature.index("]")].count(",") + 1
        takes += [MAP, *["i32"] * rank, *["i64"] * rank]
    elif signature != "constexpr":
        takes.append("*" if signature.startswith("*") else signature)


class Loaded:
    """A kernel on a GPU, launched with its parameters: addresses, numbers, and for a tensor map the
    tensor's address, lengths and strides."""

    def __init__(
        self, binary: Binary, function: int, form: struct.Struct, offsets: tuple[int, ...]
    ) -> None:
        self.binary = binary
        self.function = function
        self.form = form
        self.offsets = offsets
        """Of its parameters, in bytes."""
        self.threads = 32 * binary.warps
        self._maps: dict[tuple[Any, ...], MapOf] = {}

    def __call__(self, grid: tuple[int, int, int], stream: int, values: Sequence[Any]) -> None:
        shared = self.binary.shared
        how = self.function, grid, self.threads, shared, stream, self.form, values
        error = cuda_driver.launch(*how)
        if error:
            _again_in_context(error, cuda_driver.launch, *how)

    def holding(
        self, values: Sequence[Any], changing: Sequence[int]
    ) -> tuple[Loaded, list[Any], list[int]]:
        """The same kernel for launches that differ by some addresses or numbers, given by their
        parameters in order: it takes these, and all between two of them as bytes, so that a launch
        packs few values. With its values, and where those that change are among them."""
        whole = self.form.pack(*values)
        form, at = "<", 0
        held: list[Any] = []
        places: list[int] = []
        for parameter in changing:
            offset, kind = self.offsets[parameter], self.binary.takes[parameter]
            # A tensor map begins with an address.
            part = _FORMS["*" if kind == MAP else kind]
            form += f"{offset - at}s{part}"
            held += [whole[at:offset], 0]
            places.append(len(held) - 1)
            at = offset + struct.calcsize("<" + part)
        form += f"{len(whole) - at}s"
        held.append(whole[at:])
        return Loaded(self.binary, self.function, struct.Struct(form), ()), held, places

    def map_of(
        self, index: int, address: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> bytes:
        """The tensor map of a tensor, for parameter `index` among the tensor maps."""
        return self.maps_of(index, shape, strides).at(address)

    def maps_of(self, index: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> MapOf:
        """The tensor maps of all tensors of one shape, for parameter `index` among them."""
        key = (index, shape, strides)
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) >= _MAPS:
                self._maps.clear()
            found = self._maps[key] = MapOf(self.binary.tilings[index], shape, strides)
        return found


class MapOf:
    """The tensor maps of tensors that are alike but for their address.

    The format of a tensor map is not documented, and the driver takes longer to make one than a
    launch takes. So it makes two; if they are the same but for the address at their beginning,
    further ones are made here by writing another address there.
    """

    def __init__(self, tiling: Tiling, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.made = partial(_map_at, tiling, shape, strides)
        self.rest = self._in_common()

    def _in_common(self) -> bytes | None:
        """What tensor maps hold after the address, if they have that form."""
        try:
            maps = [(a, self.made(a)) for a in (_SOMEWHERE, ~_SOMEWHERE & _ADDRESSES)]
        except RegardError:
            # The driver refuses an address that was not allocated.
            return None
        rest = maps[0][1][8:]
        alike = all(found == a.to_bytes(8, "little") + rest for a, found in maps)
        return rest if alike else None

    def at(self, address: int) -> bytes:
        if self.rest is None:
            return self.made(address)
        return address.to_bytes(8, "little") + self.rest


def _map_at(
    tiling: Tiling, shape: tuple[int, ...], strides: tuple[int, ...], address: int
) -> bytes:
    return cuda_driver.tensor_map(address, tiling, shape, strides)


def load(binary: Binary) -> Loaded | None:
    """A kernel on the current GPU; None where its parameters are not what its binary says."""
    _enter_context()
    function = cuda_driver.load(binary.code, binary.name, binary.shared)
    given = cuda_driver.parameters(function)
    form = layout(binary.takes, given)
    offsets = tuple(place.offset for place in given)
    return None if form is None else Loaded(binary, function, form, offsets)


def clear(address: int, size: int, stream: int) -> None:
    """Set so many bytes on the GPU to 0."""
    error = cuda_driver.clear(address, size, stream)
    if error:
        _again_in_context(error, cuda_driver.clear, address, size, stream)


def _again_in_context(error: int, command: Callable[..., int], *how: Any) -> None:
    """Do it once more if all that was missing is a context, which threads enter at their first
    launch; else say what went wrong."""
    if error == cuda_driver.INVALID_CONTEXT:
        _enter_context()
        error = command(*how)
    if error:
        cuda_driver.check_launch(error)


def _enter_context() -> None:
    """A thread that has not used CUDA yet, such as one of autograd's, gets a context of PyTorch."""
    torch.zeros(1, device="cuda")


def layout(takes: Sequence[str], given: Sequence[Parameter]) -> struct.Struct | None:
    """How parameters are packed, each at the offset the binary gives; those that Triton adds are 0.
    None where their sizes differ."""
    hidden = len(given) - len(takes)
    forms = [_FORMS[kind] for kind in takes] + ["8x"] * hidden
    if not 0 <= hidden <= _HIDDEN:
        return None
    form, at = "<", 0
    for part, place in zip(forms, given, strict=True):
        if place.offset < at or place.size != struct.calcsize("<" + part):
            return None
        form += f"{place.offset - at}x{part}"
        at = place.offset + place.size
    return struct.Struct(form)
