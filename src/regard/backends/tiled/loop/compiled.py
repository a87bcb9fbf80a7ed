"""The compiled inner loop.

Separate PyTorch operations read and write a tile of logits half a dozen times; the C functions do
it twice. They are checked against the formulas before they are trusted. Where they cannot be had,
PyTorch's operations run instead, and plans say so.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.backends.tiled.loop.library import UnavailableError

_pointer, _long = ctypes.c_void_p, ctypes.c_long

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types of numbers, as tile.h counts them."""


class Call(ctypes.Structure):
    """What `call` is in call.h: heads and row tiles to work through in one go."""

    _fields_ = (
        *((name, _pointer) for name in ("multiply", "q", "k", "v")),
        *((name, _long * 3) for name in ("q_steps", "k_steps", "v_steps")),
        ("type", _long),
        *((name, _pointer) for name in ("multiply_halves", "multiply_packed", "release")),
        *((name, _pointer) for name in ("q_halves", "k_halves", "v_halves")),
        *((name, _long * 3) for name in ("q_half_steps", "k_half_steps", "v_half_steps")),
        *((name, _pointer) for name in ("k_packed", "v_packed", "k_mixed", "v_compared")),
        *((name, _long) for name in ("unpacked", "whole_heads")),
        *((name, _long) for name in ("rows_step", "B", "G", "R", "Q", "K", "D", "E")),
        *((name, _long) for name in ("stacked", "low", "high", "rows", "keys")),
        *((name, _long) for name in ("first_tile", "last_tile")),
        ("bias", _pointer),
        ("bias_steps", _long * 4),
        *((name, _pointer) for name in ("tiles", "cuts", "parts", "scratch")),
        ("scratch_step", _long),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        *((name, _long) for name in ("next", "harmed")),
    )


class Attend(ctypes.Structure):
    """What `forward` is in forward.c."""

    _anonymous_ = ("of",)
    _fields_ = (
        ("of", Call),
        *((name, _pointer) for name in ("out", "out_halves", "lse", "rest")),
        *((name, _pointer) for name in ("largest", "entropy", "sink")),
    )


class Pull(ctypes.Structure):
    """What `backward` is in backward.c."""

    _anonymous_ = ("of",)
    _fields_ = (
        ("of", Call),
        ("g", _pointer),
        ("g_steps", _long * 3),
        *((name, _pointer) for name in ("lse", "rest", "shift", "heat", "expected", "out")),
        *((name, _pointer) for name in ("dq", "dk", "dv")),
        *((name, _long) for name in ("dk_step", "dv_step", "key_heads", "hands", "fresh")),
    )


class Units(ctypes.Structure):
    """What `units` is in units.c: a tile of additive attention."""

    _fields_ = (
        *((name, _pointer) for name in ("q", "k", "w", "logits", "d", "dq", "dk", "dw")),
        *((name, _long) for name in ("B", "G", "R", "Q", "K", "D")),
        *((name, _long) for name in ("k_head", "k_unit", "w_head", "mode")),
    )


AGAIN = struct.Struct("12P5l")
"""What `known_call` is in forward.c. It is passed as bytes: they are made and handed over in half
the time that ctypes takes for as many arguments."""
PULL_AGAIN = struct.Struct("12P4l")
"""What `known_pull` is in backward.c, passed alike."""


class Loop:
    """The C functions, for float32 tensors on the CPU."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        runtime = Runtime.of_torch()
        functions.regard_use(*map(_pointer, (runtime.parallel, runtime.number, runtime.size)))
        self.absorb_rows, self.fill_rows = functions.regard_absorb, functions.regard_fill
        self.attend_tiles, self.pull_tiles = functions.regard_attend, functions.regard_pull
        self.absorb_rows.argtypes = [_pointer] * 5 + [_long] * 3 + [ctypes.c_int]
        self.fill_rows.argtypes = [_pointer] * 2 + [_long] * 10 + [ctypes.c_float, ctypes.c_int]
        self.attend_tiles.argtypes = [ctypes.POINTER(Attend), ctypes.c_int]
        self.pull_tiles.argtypes = [ctypes.POINTER(Pull), ctypes.c_int]
        self.compare_units, self.pull_units = (
            functions.regard_compare_units,
            functions.regard_pull_units,
        )
        of_units = (self.compare_units, self.pull_units)
        for function in of_units:
            function.argtypes = [ctypes.POINTER(Units), ctypes.c_int]
        for function in (
            self.absorb_rows, self.fill_rows, self.attend_tiles, self.pull_tiles, *of_units
        ):  # fmt: skip
            function.restype = None
        self.attend_again: Callable[[bytes], int] = functions.regard_attend_again
        """A call of a known kind, as `AGAIN` packs it. Whether no masked value can have done harm.
        Without argument types: bytes are passed as the address of what they hold."""
        self.pull_again: Callable[[bytes], int] = functions.regard_pull_again
        """Its backward pass, as `PULL_AGAIN` packs it."""
        self.compares_units = True
        self.multiply, self.multiply_halves = runtime.multiply, runtime.multiply_halves
        self.multiply_packed, self.release = runtime.multiply_packed, runtime.release

    def attend(self, call: Attend, threads: int) -> bool:
        """The forward pass of some row tiles; the call's pointers must stay good until then.
        Whether no masked value can have done harm: all is finite where something is masked."""
        self.attend_tiles(call, threads)
        return not call.harmed

    def pull(self, call: Pull, threads: int) -> None:
        """The backward pass of some row tiles, added to gradients of keys and values."""
        self.pull_tiles(call, threads)

    def absorb(
        self,
        s: Float[Tensor, "b g r q k"],
        largest: Float[Tensor, "b g r q 1"],
        total: Float[Tensor, "b g r q 1"],
        energy: Float[Tensor, "b g r q 1"] | None,
        mixed: Float[Tensor, "b g r q e"] | None,
    ) -> None:
        """Turn logits into weights, in place, and add them to the running sums; what is mixed so
        far shrinks as the maximum moves. Without `mixed` the sums begin here."""
        self.absorb_rows(
            s.data_ptr(), largest.data_ptr(), total.data_ptr(),
            None if energy is None else energy.data_ptr(),
            None if mixed is None else mixed.data_ptr(),
            largest.numel(), s.shape[-1], 0 if mixed is None else mixed.shape[-1],
            torch.get_num_threads(),
        )  # fmt: skip

    def fill(
        self,
        t: Float[Tensor, "b g r q k"],
        keys: slice,
        hidden: Bool[Tensor, "b2 g2 r2 q2 some_k"],
        value: float,
    ) -> None:
        """Write a value where pairs are masked among some of a tile's keys, in place."""
        part = keys.stop - keys.start
        *strides, _ = hidden.expand(*t.shape[:4], part).stride()
        self.fill_rows(
            t.data_ptr() + keys.start * t.element_size(), hidden.data_ptr(), *t.shape[:4],
            *strides, t.shape[4], part, value, torch.get_num_threads(),
        )  # fmt: skip


class Runtime(NamedTuple):
    """Addresses of functions inside PyTorch: OpenMP's, and the matrix products."""

    parallel: int
    number: int
    size: int
    multiply: int | None
    multiply_halves: dict[torch.dtype, int]
    """Of narrow matrices (MKL), where the CPU multiplies those: elsewhere it is slower."""
    multiply_packed: dict[torch.dtype, int]
    """Of matrices whose second one was packed before (AMX): what PyTorch's own attention calls."""
    release: int | None
    """What a thread calls after its last packed product."""

    @classmethod
    def of_torch(cls) -> Runtime:
        """What libtorch_cpu itself calls. A symbol is looked for in that library and in those it
        was linked with, wherever they lie and whatever their names, and nothing is loaded."""
        path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        try:
            torch_cpu = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            raise UnavailableError("PyTorch's own library is not where it should be") from None

        def address(name: str) -> int | None:
            try:
                return ctypes.cast(getattr(torch_cpu, name), _pointer).value
            except AttributeError:
                return None

        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        parallel, number, size = map(address, names)
        if parallel is None or number is None or size is None:
            raise UnavailableError("PyTorch runs on no OpenMP that the compiled one knows")
        halves = {}
        if torch.cpu._is_amx_tile_supported():
            halves[torch.bfloat16] = address("gemm_bf16bf16f32_")
        if platform.machine() == "x86_64" and torch.ops.mkldnn._is_mkldnn_fp16_supported():
            halves[torch.float16] = address("gemm_f16f16f32_")
        given = {dtype: found for dtype, found in halves.items() if found is not None}
        packed, could_pack, release = {}, address(COULD_PACK), address(RELEASE)
        if could_pack is not None and release is not None:
            asked = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int8)(could_pack)
            for dtype, (scalar_type, name) in PACKED.items():
                found = address(name) if asked(scalar_type) else None
                if found is not None:
                    packed[dtype] = found
        return cls(parallel, number, size, address("sgemm_"), given, packed, release)


# Functions of at::native::cpublas (ATen/native/CPUBlas.h), as a C++ compiler names them: what is
# not found under exactly these names and arguments is not used.
COULD_PACK = "_ZN2at6native7cpublas10could_packEN3c1010ScalarTypeE"
RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
PACKED = {
    torch.bfloat16: (15, "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"),
    torch.float16: (5, "_ZN2at6native7cpublas6brgemmEllllllbPKN3c104HalfES5_Pfb"),
}
"""The c10::ScalarType of a type, and the product (brgemm) of such matrices."""
