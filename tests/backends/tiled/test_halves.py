"""Products of narrow matrices in the compiled loop, on any machine: what multiplies them here is
written in Python, and called from C."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

import regard
from regard import masks
from regard.backends.tiled.loop import inner_loop, trust
from regard.backends.tiled.loop.compiled import Loop

_long, _float = ctypes.POINTER(ctypes.c_long), ctypes.POINTER(ctypes.c_float)
PRODUCT = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, _long, _long, _long, _float, ctypes.c_void_p, _long,
    ctypes.c_void_p, _long, _float, ctypes.c_void_p, _long,
)  # fmt: skip


class Product:
    """gemm_bf16bf16f32 or gemm_f16f16f32, matrices column by column; `wrong` is added to what it
    gives."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.calls, self.wrong = dtype, 0, 0.0
        self.function = PRODUCT(self._multiply)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value

    def _multiply(
        self, ta: bytes, tb: bytes, m: Any, n: Any, k: Any, alpha: Any, a: int, lda: Any, b: int,
        ldb: Any, beta: Any, c: int, ldc: Any,
    ) -> None:  # fmt: skip
        self.calls += 1
        m, n, k, lda, ldb, ldc = (x[0] for x in (m, n, k, lda, ldb, ldc))
        assert tb == b"N"
        left = self._halves(a, k, m, lda).T if ta == b"T" else self._halves(a, m, k, lda)
        found = alpha[0] * (left @ self._halves(b, k, n, ldb)) + self.wrong
        memory = np.ctypeslib.as_array((ctypes.c_float * (ldc * (n - 1) + m)).from_address(c))
        into = as_strided(memory, (m, n), (4, 4 * ldc))
        into[:] = found + beta[0] * into if beta[0] else found

    def _halves(self, address: int, rows: int, columns: int, step: int) -> Any:
        memory = (ctypes.c_uint16 * (step * (columns - 1) + rows)).from_address(address)
        numbers = np.ctypeslib.as_array(memory)
        if self.dtype == torch.float16:
            wide = numbers.view(np.float16).astype(np.float32)
        else:
            wide = (numbers.astype(np.uint32) << 16).view(np.float32)
        return as_strided(wide, (rows, columns), (4, 4 * step))


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Product]:
    loop, why_not = inner_loop.found()
    if loop is None or loop.multiply is None:
        pytest.skip(f"there is no compiled loop here: {why_not}")
    made = Product(request.param)
    monkeypatch.setattr(loop, "multiply_packed", {})
    monkeypatch.setattr(loop, "multiply_halves", {made.dtype: made.address})
    # A thread that Python does not know cannot call it in order.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield made
    torch.set_num_threads(before)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize(
    "mask",
    [None, masks.causal(), masks.causal() & masks.window(20),
     masks.documents(torch.arange(150) // 37)],
    ids=["none", "causal", "window", "documents"],
)  # fmt: skip
@pytest.mark.parametrize("key_heads", [4, 1])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_halves_give_what_float32_gives(
    product: Product,
    mask: Any,
    key_heads: int,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = (2, 4, 150, 24), (2, key_heads, 150, 24), (2, key_heads, 150, 40)
    q, k, v = (numbers(*shape).to(product.dtype) for shape in shapes)
    if layout == "columns":
        q, k, v = (t.mT.contiguous().mT for t in (q, k, v))
    g = numbers(2, 4, 150, 40).to(product.dtype)
    found, gradients = _both_passes("tiled", [q, k, v], mask, g)
    assert product.calls
    right, expected = _both_passes("reference", [t.double() for t in (q, k, v)], mask, g.double())
    monkeypatch.setattr(inner_loop.found()[0], "multiply_halves", {})
    calls = product.calls
    plain, usual = _both_passes("tiled", [q, k, v], mask, g)
    assert product.calls == calls
    for name in ("lse", "entropy", "max_logit"):
        torch.testing.assert_close(getattr(found, name), getattr(right, name).float())
    for mine, theirs, exact in zip(
        (found.out, *gradients), (plain.out, *usual), (right.out, *expected), strict=True
    ):
        error, allowed = ((t.double() - exact).abs().max() for t in (mine, theirs))
        assert error <= 2 * allowed


def _both_passes(
    backend: str, tensors: list[Tensor], mask: Any, g: Tensor
) -> tuple[regard.Trace, tuple[Tensor, ...]]:
    given = [t.detach().requires_grad_() for t in tensors]
    trace = regard.trace(*given, mask=mask, backend=backend)
    return trace, torch.autograd.grad(trace.out, given, g)


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=str)
def test_calls_that_come_again(product: Product, mask: Any) -> None:
    shapes = (1, 4, 70, 9), (1, 2, 70, 9), (1, 2, 70, 5)
    with torch.no_grad():
        for _ in range(3):
            q, k, v = (torch.randn(*shape).to(product.dtype) for shape in shapes)
            before = product.calls
            found = regard.trace(q, k, v, mask=mask, backend="tiled")
            assert product.calls > before
            with torch.enable_grad():
                plain = regard.trace(*(t.requires_grad_() for t in (q, k, v)), mask=mask)
            assert torch.equal(found.out, plain.out)
            assert torch.equal(found.lse, plain.lse)


def test_hidden_and_broken_numbers(product: Product) -> None:
    """A hidden NaN stays hidden; a query that is not finite has no weights."""
    q, k, v = (numbers(1, 1, 9, 8).to(product.dtype) for _ in range(3))
    v[:, :, 8] = float("nan")
    out = regard.attention(q, k, v, mask=masks.causal(), backend="tiled")
    assert torch.isfinite(out[:, :, :8]).all()
    assert out[:, :, 8].isnan().all()
    q[:, :, 3] = -float("inf")
    k = k.abs()
    t = regard.trace(q, k, v.nan_to_num(), backend="tiled")
    assert t.out[:, :, 3].isnan().all()
    assert torch.isfinite(t.out[:, :, 4]).all()
    assert product.calls


def test_other_types_are_not_multiplied_so(product: Product) -> None:
    q = numbers(1, 1, 9, 8)
    for dtype in {torch.float32, torch.bfloat16, torch.float16} - {product.dtype}:
        regard.trace(*[q.to(dtype)] * 3, backend="tiled")
    assert not product.calls


def test_products_that_are_wrong_are_not_trusted(product: Product) -> None:
    loop = inner_loop.found()[0]
    assert isinstance(loop, Loop)
    assert trust.trusted(loop)
    assert loop.multiply_halves == {product.dtype: product.address}
    product.wrong = 0.5
    assert trust.trusted(loop)
    assert not loop.multiply_halves
