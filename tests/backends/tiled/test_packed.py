"""Products of packed matrices in the compiled loop, on any machine: what multiplies them here is
written in Python, and called from C."""

from __future__ import annotations

import ctypes
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.backends.reference import ReferencePass
from regard.backends.tiled import Tiled, TiledPass, plan, tiles
from regard.backends.tiled.loop import inner_loop, library, trust
from regard.backends.tiled.loop.compiled import Loop
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot
from tests.backends.tiled.packed_product import DTYPES, Product, Released
from tests.parity import cases


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def traced(
    backend: str, tensors: list[Tensor], g: Tensor, mask: Any = None, **more: Any
) -> tuple[regard.Trace, tuple[Tensor, ...]]:
    given = [t.detach().requires_grad_() for t in tensors]
    trace = regard.trace(*given, mask=mask, backend=backend, **more)
    return trace, torch.autograd.grad(trace.out, given, g)


def check(product: Product, tensors: list[Tensor], mask: Any = None, **more: Any) -> None:
    """Beside float64; in error no more than twice what products of float32 make, and twice that for
    gradients: they go through two matrices that are rounded."""
    q, _, v = tensors
    g = numbers(*q.shape[:3], v.shape[3]).to(q.dtype)
    product.sizes.clear()
    found, gradients = traced("tiled", tensors, g, mask, **more)
    assert product.sizes
    wide = {name: t.double() if isinstance(t, Tensor) else t for name, t in more.items()}
    right, expected = traced("reference", [t.double() for t in tensors], g.double(), mask, **wide)
    loop = inner_loop.found()[0]
    assert loop is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "multiply_packed", {})
        calls = len(product.sizes)
        plain, usual = traced("tiled", tensors, g, mask, **more)
        assert len(product.sizes) == calls
    assert found.out.dtype == q.dtype
    for name in ("lse", "entropy", "max_logit"):
        torch.testing.assert_close(getattr(found, name), getattr(right, name).float())
    for mine, theirs, exact, times in zip(
        (found.out, *gradients),
        (plain.out, *usual),
        (right.out, *expected),
        (2, 4, 4, 4),
        strict=True,
    ):
        error, allowed = ((t.double() - exact).abs().max() for t in (mine, theirs))
        assert error <= times * allowed


MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.causal() & masks.window(21),
    "wide window": masks.window(90, 33),
    "documents": masks.documents(torch.arange(150) // 37),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(("key_heads", "layout"), [(4, "rows"), (1, "columns")])
def test_packed_gives_what_float32_gives(
    product: Product, mask: Any, key_heads: int, layout: str
) -> None:
    q, k, v = numbers(2, 4, 150, 24), numbers(2, key_heads, 150, 24), numbers(2, key_heads, 150, 40)
    tensors = [t.to(product.dtype) for t in (q, k, v)]
    if layout == "columns":
        tensors = [t.mT.contiguous().mT for t in tensors]
    check(product, tensors, mask)


@pytest.mark.parametrize("mask", cases.MASKS)
def test_conformance(product: Product, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule that holds for every backend."""
    monkeypatch.setattr(tiles, "KEY_TILE", 8)
    monkeypatch.setattr(plan, "fused_size", lambda x: tiles.TileSize(2, 14, 16))
    extra = "sink" if list(cases.MASKS).index(mask) % 2 else "plain"
    case = cases.Case(mask=mask, extra=extra, dtype=product.dtype)
    inputs, learned = case.build()
    got = cases.observed(Tiled(), inputs, learned, TiledPass())
    assert product.sizes or mask == "nothing"
    cases.assert_conforms(case, got, ReferencePass())


@pytest.mark.parametrize(
    ("Q", "K", "D", "E"), [(1, 2, 1, 1), (7, 21, 3, 5), (63, 111, 9, 17), (33, 65, 40, 2)]
)
def test_odd_sizes(product: Product, Q: int, K: int, D: int, E: int) -> None:
    tensors = [numbers(1, 2, Q, D), numbers(1, 1, K, D), numbers(1, 1, K, E)]
    check(product, [t.to(product.dtype) for t in tensors], masks.causal())


def test_several_runs_of_keys(product: Product) -> None:
    """More keys than a run holds, and cuts of a table that begin and end within runs."""
    tensors = [numbers(1, 1, 40, 8), numbers(1, 1, 1300, 8), numbers(1, 1, 1300, 6)]
    given = [t.to(product.dtype) for t in tensors]
    check(product, given)
    check(product, given, masks.causal() & masks.window(900))
    seen = torch.zeros(40, 1300, dtype=torch.bool)
    seen[:, 130:1201] = numbers(40, 1071) > 0
    check(product, given, masks.keep(seen))
    assert any(n < 512 for _, n, _ in product.sizes)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 3.0])
def test_scales_and_sinks(product: Product, scale: float) -> None:
    tensors = [numbers(1, 2, 20, 8).to(product.dtype) for _ in range(3)]
    sink = torch.tensor([0.5, -1.0])
    check(product, tensors, scale=scale, sink=sink)
    check(product, tensors, masks.causal(), scale=scale, sink=sink)


def test_queries_that_see_nothing(product: Product) -> None:
    tensors = [numbers(1, 2, 20, 8).to(product.dtype) for _ in range(3)]
    keep = torch.ones(20, 20, dtype=torch.bool)
    keep[3] = keep[17] = False
    check(product, tensors, masks.keep(keep))
    trace = regard.trace(*tensors, mask=masks.keep(keep), backend="tiled")
    assert (trace.out[:, :, [3, 17]] == 0).all()
    assert (trace.lse[:, :, [3, 17]] == -math.inf).all()


def test_hidden_and_broken_numbers(product: Product) -> None:
    """A hidden NaN stays hidden; a query that is not finite has no weights."""
    q, k, v = (numbers(1, 1, 90, 8).to(product.dtype) for _ in range(3))
    k[:, :, 70], v[:, :, 70:] = math.nan, math.nan
    out = regard.attention(q, k, v, mask=masks.causal(), backend="tiled")
    assert torch.isfinite(out[:, :, :70]).all()
    assert out[:, :, 70:].isnan().all()
    # Also where nothing is hidden but what the product reaches beyond the keys of its cut.
    out = regard.attention(q[:, :, :1], k, v, mask=masks.causal(offset=66), backend="tiled")
    assert torch.isfinite(out).all()
    q[:, :, 3] = -math.inf
    k, v = k.nan_to_num(1.0).abs(), v.nan_to_num()
    t = regard.trace(q, k, v, backend="tiled")
    assert t.out[:, :, 3].isnan().all()
    assert torch.isfinite(t.out[:, :, 4]).all()
    assert product.sizes


def test_a_broken_key_is_seen_in_later_runs(product: Product) -> None:
    q, k = numbers(1, 1, 3, 8).to(product.dtype), numbers(1, 1, 700, 8).to(product.dtype)
    k[:, :, 5] = math.nan
    t = regard.trace(q, k, torch.ones_like(k), backend="tiled")
    assert product.sizes
    assert t.max_logit.isnan().all()
    assert t.out.isnan().all()


def test_large_logits(product: Product) -> None:
    """Both passes round them alike: weights add up to 1 in the backward pass, too."""
    q, k = (3000 * numbers(1, 1, 40, 24).to(product.dtype) for _ in range(2))
    v = torch.ones_like(k)
    trace, (_, _, dv) = traced("tiled", [q, k, v], torch.ones_like(v), masks.causal())
    assert trace.max_logit.max() > 2**24
    torch.testing.assert_close(trace.out, torch.ones_like(v))
    torch.testing.assert_close(dv.float().sum(2), torch.full((1, 1, 24), 40.0), rtol=0.02, atol=0)


def test_memory_is_not_read_before_it_is_written(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned = Tensor.new_empty

    def new_empty(self: Tensor, *shape: Any, **more: Any) -> Tensor:
        return poisoned(self, *shape, **more).fill_(math.nan)

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    tensors = [numbers(1, 2, 37, 5), numbers(1, 1, 75, 5), numbers(1, 1, 75, 3)]
    # Nor is what lies between and behind rows.
    given = [
        torch.nn.functional.pad(t, (0, 2, 0, 1), value=math.nan).to(product.dtype)[
            ..., : t.shape[2], : t.shape[3]
        ]
        for t in tensors
    ]
    check(product, given, masks.causal())
    check(product, given)


def test_sizes_are_few(product: Product) -> None:
    """PyTorch keeps a kernel for every size that it was ever asked for."""
    for n in range(65, 129):
        q = numbers(1, 1, n, 8).to(product.dtype)
        regard.attention(q, q, q, mask=masks.causal(), backend="tiled")
    assert len(set(product.sizes)) <= 24


def test_threads_are_released(product: Product, released: Released) -> None:
    q = numbers(1, 1, 40, 8).to(product.dtype)
    regard.attention(q, q, q, backend="tiled")
    assert product.sizes
    assert released.times == 1


STAND_IN = r"""
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
static int released;
static float wide(uint16_t x)
{
    uint32_t y = (uint32_t)x << 16;
    float z;
    memcpy(&z, &y, 4);
    return z;
}
void multiply(long m, long n, long k, long lda, long ldb, long ldc, bool add, const uint16_t *a,
              const uint16_t *b, float *c, bool vnni)
{
    for (long i = 0; i < m; i++)
        for (long j = 0; j < n; j++) {
            float sum = add ? c[i * ldc + j] : 0;
            for (long d = 0; d < k; d++)
                sum += wide(a[i * lda + d]) * wide(b[(d / 2 * ldb + j) * 2 + d % 2]);
            c[i * ldc + j] = sum;
        }
}
void release(bool vnni) { __atomic_fetch_add(&released, 1, __ATOMIC_RELAXED); }
int times(void) { return released; }
"""


@pytest.mark.parametrize(("n", "threads"), [(700, 3), (300, 2)], ids=["shared", "whole heads"])
@pytest.mark.parametrize("mask", ["none", "causal", "documents"])
def test_several_threads(
    mask: str, n: int, threads: int, loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share what is packed, or each packs keys for itself, and each is released."""
    masked = {"causal": masks.causal(), "documents": masks.documents(torch.arange(n) // 130)}
    how = masked.get(mask)
    (tmp_path / "product.c").write_text(STAND_IN)
    options = ["-O2", "-shared", "-fPIC", "-o", str(tmp_path / "product.so")]
    subprocess.run([*library._compiler(), *options, str(tmp_path / "product.c")], check=True)
    functions = ctypes.CDLL(str(tmp_path / "product.so"))
    q, k, v = (numbers(1, h, n, 8).bfloat16() for h in (4, 2, 2))
    g = numbers(1, 4, n, 8).bfloat16()
    right, expected = traced("reference", [t.double() for t in (q, k, v)], g.double(), how)
    address = ctypes.cast(functions.multiply, ctypes.c_void_p).value
    monkeypatch.setattr(loop, "multiply_packed", {torch.bfloat16: address})
    monkeypatch.setattr(loop, "release", ctypes.cast(functions.release, ctypes.c_void_p).value)
    torch.set_num_threads(threads)
    found, gradients = traced("tiled", [q, k, v], g, how)
    assert functions.times() >= 2 * 2
    torch.testing.assert_close(found.lse, right.lse.float())
    for mine, exact in zip((found.out, *gradients), (right.out, *expected), strict=True):
        assert (mine.double() - exact).abs().max() <= 2**-7 * exact.abs().max()
    x = AttentionInputs(q, k, v, Dot(1.0))
    assert plan.Plan.of(x, loop).whole_heads(2) == (n == 300)
    for _ in range(3):
        again = regard.trace(q, k, v, mask=how, backend="tiled")
        for name in ("out", "lse", "entropy"):
            assert torch.equal(getattr(again, name), getattr(found, name))


def test_few_rows_are_not_packed(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PACKED_ROWS", 32)
    q = numbers(1, 1, 40, 8).to(product.dtype)
    regard.attention(q[:, :, :31], q, q, backend="tiled")
    assert not product.sizes
    regard.attention(q, q, q, backend="tiled")
    assert product.sizes


def test_nothing_is_packed_when_onednn_is_off(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    q = numbers(1, 1, 40, 8).to(product.dtype)
    regard.attention(q, q, q, backend="tiled")
    assert not product.sizes


def test_other_types_are_not_packed(product: Product) -> None:
    q = numbers(1, 1, 40, 8)
    for dtype in {torch.float32, torch.float64, *DTYPES} - {product.dtype}:
        regard.trace(*[q.to(dtype)] * 3, backend="tiled")
    assert not product.sizes


def test_products_that_are_wrong_are_not_trusted(product: Product, loop: Loop) -> None:
    assert trust.trusted(loop)
    assert loop.multiply_packed == {product.dtype: product.address}
    product.wrong = 0.5
    assert trust.trusted(loop)
    assert not loop.multiply_packed


def test_the_plan_tells_what_is_packed_and_counts_its_memory(product: Product, loop: Loop) -> None:
    q = numbers(1, 2, 600, 8).to(product.dtype)
    packed = regard.plan(q, q, q, backend="tiled")
    dtype = str(product.dtype).removeprefix("torch.")
    assert packed.inner_loop.endswith(f"products and all, of packed {dtype} matrices")
    loop.multiply_packed = {}
    plain = regard.plan(q, q, q, backend="tiled")
    assert plain.inner_loop.endswith("products and all")
    assert packed.peak_memory > plain.peak_memory + 2 * 2 * 600 * 2 * 8
