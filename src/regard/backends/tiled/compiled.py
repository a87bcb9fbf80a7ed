"""The compiled inner loop.

Separate PyTorch operations read and write a tile of logits half a dozen times; the functions of
tile.c do it twice. They are checked against the formulas before they are trusted. Where they
cannot be had, PyTorch's operations run instead, and plans say so.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.backends.tiled.library import UnavailableError

_pointer, _long = ctypes.c_void_p, ctypes.c_long


class Wave(ctypes.Structure):
    """What `wave` is in tile.c: heads and row tiles to attend to in one go."""

    _fields_ = (
        *((name, _pointer) for name in ("multiply", "q", "k", "v")),
        *((name, _long * 3) for name in ("q_steps", "k_steps", "v_steps")),
        *((name, _pointer) for name in ("largest", "total", "energy", "means")),
        *((name, _long) for name in ("sums_step", "B", "G", "R", "Q", "D", "E")),
        *((name, _pointer) for name in ("tiles", "cuts", "parts")),
        ("n_tiles", _long),
        ("scratch", _pointer),
        ("scratch_step", _long),
        ("scale", ctypes.c_float),
        ("next", _long),
        ("harmed", _long),
    )


class Loop:
    """The functions of tile.c, for contiguous float32 tensors on the CPU."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        runtime = Runtime.of_torch()
        functions.regard_use(*map(_pointer, (runtime.parallel, runtime.number, runtime.count)))
        self.absorb_rows, self.fill_rows = functions.regard_absorb, functions.regard_fill
        self.attend_wave = functions.regard_attend
        self.absorb_rows.argtypes = [_pointer] * 5 + [_long] * 3 + [ctypes.c_int]
        self.fill_rows.argtypes = [_pointer] * 2 + [_long] * 10 + [ctypes.c_float, ctypes.c_int]
        self.attend_wave.argtypes = [ctypes.POINTER(Wave), ctypes.c_int]
        self.absorb_rows.restype = self.fill_rows.restype = self.attend_wave.restype = None
        self.multiply = runtime.multiply

    def attend(self, wave: Wave, threads: int) -> bool:
        """Attend to all row tiles of a wave; its pointers must stay good until then. Whether no
        hidden value can have done harm: everything is finite where something is hidden."""
        self.attend_wave(wave, threads)
        return not wave.harmed

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
        """Write a value where pairs are hidden among some of a tile's keys, in place."""
        part = keys.stop - keys.start
        *strides, _ = hidden.expand(*t.shape[:4], part).stride()
        self.fill_rows(
            t.data_ptr() + keys.start * t.element_size(), hidden.data_ptr(), *t.shape[:4],
            *strides, t.shape[4], part, value, torch.get_num_threads(),
        )  # fmt: skip


class Runtime(NamedTuple):
    """Addresses of functions inside PyTorch: OpenMP's, and the matrix product."""

    parallel: int
    number: int
    count: int
    multiply: int | None

    @classmethod
    def of_torch(cls) -> Runtime:
        """What libtorch_cpu itself calls. A symbol is looked for in that library and in those it was
        linked with, wherever they lie and whatever they are called, and nothing is loaded."""
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
        parallel, number, count = map(address, names)
        if parallel is None or number is None or count is None:
            raise UnavailableError("PyTorch runs on no OpenMP that the compiled one knows")
        return cls(parallel, number, count, address("sgemm_"))
