"""What multiplies packed matrices, written in Python and called from C."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

_long, _pointer, _bool = ctypes.c_long, ctypes.c_void_p, ctypes.c_bool
PRODUCT = ctypes.CFUNCTYPE(None, *[_long] * 6, _bool, _pointer, _pointer, _pointer, _bool)
RELEASE = ctypes.CFUNCTYPE(None, _bool)
DTYPES = [torch.bfloat16, torch.float16]


class Product:
    """at::native::cpublas::brgemm of one type; `wrong` is added to what it gives."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.wrong = dtype, 0.0
        self.sizes: list[tuple[int, int, int]] = []
        self.function = PRODUCT(self._multiply)
        self.address = ctypes.cast(self.function, _pointer).value

    def _multiply(
        self, m: int, n: int, k: int, lda: int, ldb: int, ldc: int, add: bool, a: int, b: int,
        c: int, vnni: bool,
    ) -> None:  # fmt: skip
        self.sizes.append((m, n, k))
        assert vnni
        assert k % 2 == 0
        assert n <= ldb
        assert n <= ldc
        assert k <= lda
        left = as_strided(self._numbers(a, lda * (m - 1) + k), (m, k), (4 * lda, 4))
        pairs = self._numbers(b, 2 * (ldb * (k // 2 - 1) + n))
        right = as_strided(pairs, (k // 2, 2, n), (8 * ldb, 4, 8)).reshape(k, n)
        with np.errstate(invalid="ignore", over="ignore"):
            found = left @ right + np.float32(self.wrong)
        memory = np.ctypeslib.as_array((ctypes.c_float * (ldc * (m - 1) + n)).from_address(c))
        into = as_strided(memory, (m, n), (4 * ldc, 4))
        into[:] = found + into if add else found

    def _numbers(self, address: int, n: int) -> Any:
        memory = np.ctypeslib.as_array((ctypes.c_uint16 * n).from_address(address))
        if self.dtype == torch.float16:
            return memory.view(np.float16).astype(np.float32)
        return (memory.astype(np.uint32) << 16).view(np.float32)


class Released:
    def __init__(self) -> None:
        self.times = 0
        self.function = RELEASE(self._release)
        self.address = ctypes.cast(self.function, _pointer).value

    def _release(self, vnni: bool) -> None:
        assert vnni
        self.times += 1
