"""What looking costs on a CPU: attention() and trace() beside PyTorch's own, in one run.

python -m benchmarks.calls.cpu [--quick]
python -m benchmarks.calls.cpu --half      only half precision, in more shapes
"""

from __future__ import annotations

import math
import platform
import statistics
import subprocess
import sys
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import regard
from benchmarks.measurement import interleaved, write
from regard import masks

HEADS, WIDTH = 8, 64


def qkv(n: int, heads: int = HEADS) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, n, WIDTH, generator=source) for _ in range(3)]


def speed(lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for n in lengths:
        for causal in (False, True):
            q, k, v = qkv(n)
            mask = masks.causal() if causal else None
            seconds = interleaved(
                {
                    "sdpa": lambda q=q, k=k, v=v, c=causal: scaled_dot_product_attention(
                        q, k, v, is_causal=c
                    ),
                    "sdpa again": lambda q=q, k=k, v=v, c=causal: scaled_dot_product_attention(
                        q, k, v, is_causal=c
                    ),
                    "attention": lambda q=q, k=k, v=v, m=mask: regard.attention(q, k, v, mask=m),
                    "trace": lambda q=q, k=k, v=v, m=mask: regard.trace(q, k, v, mask=m),
                    "tiled": lambda q=q, k=k, v=v, m=mask: regard.attention(
                        q, k, v, mask=m, backend="tiled"
                    ),
                },
                repeats * 8 if n <= 256 else repeats if n < 8192 else max(3, repeats // 3),
            )
            flops = 4 * HEADS * WIDTH * (n * (n + 1) / 2 if causal else n * n)
            rows.append(
                {
                    "n": n,
                    "causal": causal,
                    "sdpa ms": seconds["sdpa"] * 1e3,
                    "sdpa GFLOP/s": flops / seconds["sdpa"] / 1e9,
                    # How far two measurements of one and the same thing are apart.
                    "sdpa / itself": seconds["sdpa"] / seconds["sdpa again"],
                    "attention() / sdpa": seconds["sdpa"] / seconds["attention"],
                    "trace() / sdpa": seconds["sdpa"] / seconds["trace"],
                    "trace() / the same tiles without statistics": seconds["tiled"]
                    / seconds["trace"],
                }
            )
    return rows


TRAINING = [(1, 8, 64, 64), (12, 4, 64, 32), (1, 8, 256, 64), (1, 8, 1024, 64), (1, 8, 2048, 64)]
"""Batch, heads, length and width; the second is that of a small model that learns letters."""


def training(shapes: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    rows = []
    for shape in shapes:
        for causal in (False, True):
            source = torch.Generator().manual_seed(0)
            q, k, v = (torch.randn(shape, generator=source).requires_grad_() for _ in range(3))
            mask = masks.causal() if causal else None
            pull = torch.randn(shape, generator=source)

            def through(
                out: torch.Tensor,
                inputs: tuple[torch.Tensor, ...] = (q, k, v),
                pull: torch.Tensor = pull,
            ) -> None:
                torch.autograd.grad(out, inputs, pull)

            def sdpa(q=q, k=k, v=v, c=causal, go=through) -> None:  # type: ignore[no-untyped-def]
                go(scaled_dot_product_attention(q, k, v, is_causal=c))

            seconds = interleaved(
                {
                    "sdpa": sdpa,
                    "sdpa again": sdpa,
                    "attention": lambda q=q, k=k, v=v, m=mask, go=through: go(
                        regard.attention(q, k, v, mask=m)
                    ),
                    "trace": lambda q=q, k=k, v=v, m=mask, go=through: go(
                        regard.trace(q, k, v, mask=m).out
                    ),
                },
                max(5, min(200, (1 << 22) // shape[2] ** 2)),
            )
            rows.append(
                {
                    "shape": list(shape),
                    "causal": causal,
                    "sdpa ms": seconds["sdpa"] * 1e3,
                    "sdpa / itself": seconds["sdpa"] / seconds["sdpa again"],
                    "attention() / sdpa": seconds["sdpa"] / seconds["attention"],
                    "trace() / sdpa": seconds["sdpa"] / seconds["trace"],
                }
            )
    return rows


def half(n: int) -> list[dict[str, Any]]:
    """Few repeats: without instructions for it PyTorch's kernel takes seconds."""
    rows = []
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (t.to(dtype) for t in qkv(n))
        seconds = interleaved(
            {
                "sdpa": lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v),
                "attention": lambda q=q, k=k, v=v: regard.attention(q, k, v),
                "trace": lambda q=q, k=k, v=v: regard.trace(q, k, v),
            },
            3,
        )
        rows.append(
            {
                "type": str(dtype).removeprefix("torch."),
                "n": n,
                "sdpa ms": seconds["sdpa"] * 1e3,
                "attention() / sdpa": seconds["sdpa"] / seconds["attention"],
                "trace() / sdpa": seconds["sdpa"] / seconds["trace"],
            }
        )
    return rows


SHAPES = [
    # Length, width, heads, key heads.
    (64, 64, 8, 8), (256, 64, 8, 8), (512, 64, 8, 8), (1024, 64, 8, 8), (2048, 64, 8, 8),
    (4096, 64, 8, 8), (256, 128, 8, 8), (1024, 128, 8, 8), (2048, 128, 8, 8), (1000, 80, 12, 12),
    (1024, 64, 32, 8),
]  # fmt: skip


def half_shapes(dtype: torch.dtype, *, backward: bool) -> list[dict[str, Any]]:
    """For CPUs with instructions for it: without, PyTorch's kernel takes minutes."""
    rows = []
    for n, width, heads, key_heads in SHAPES:
        if backward and (n > 2048 or key_heads < heads):
            continue
        for causal in (False, True):
            source = torch.Generator().manual_seed(0)
            q, k, v = (
                torch.randn(1, h, n, width, generator=source).to(dtype).requires_grad_(backward)
                for h in (heads, key_heads, key_heads)
            )
            mask, pull = masks.causal() if causal else None, torch.ones_like(q)

            def through(out: torch.Tensor, q=q, k=k, v=v, pull=pull) -> None:  # type: ignore[no-untyped-def]
                if backward:
                    torch.autograd.grad(out, (q, k, v), pull)

            def sdpa(q=q, k=k, v=v, causal=causal, go=through) -> None:  # type: ignore[no-untyped-def]
                shared = q.shape[1] != k.shape[1]
                go(scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared))

            runs = {
                "sdpa": sdpa,
                "sdpa again": sdpa,
                "trace": lambda q=q, k=k, v=v, m=mask, go=through: go(
                    regard.trace(q, k, v, mask=m).out
                ),
                "tiled": lambda q=q, k=k, v=v, m=mask, go=through: go(
                    regard.attention(q, k, v, mask=m, backend="tiled")
                ),
            }
            seconds = interleaved(runs, max(3, min(60, (1 << 24) // (n * n))))
            rows.append(
                {
                    "n": n,
                    "width": width,
                    "heads": f"{heads}/{key_heads}",
                    "causal": causal,
                    "sdpa ms": seconds["sdpa"] * 1e3,
                    "sdpa / itself": seconds["sdpa"] / seconds["sdpa again"],
                    "tiled attention() / sdpa": seconds["sdpa"] / seconds["tiled"],
                    "trace() / sdpa": seconds["sdpa"] / seconds["trace"],
                }
            )
    return rows


def only_half() -> None:
    tables = {}
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        with torch.no_grad():
            tables[f"Forward, {name}"] = half_shapes(dtype, backward=False)
        tables[f"Forward and backward, {name}"] = half_shapes(dtype, backward=True)
    tables["Worst and mean"] = worst(tables)
    write("cpu_half", tables)


def worst(tables: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The worst ratio of each table, and the geometric mean."""
    rows = []
    for title, table in tables.items():
        found = [row["trace() / sdpa"] for row in table if "trace() / sdpa" in row]
        if found:
            mean = math.exp(statistics.fmean(map(math.log, found)))
            rows.append({"trace() / sdpa": title, "worst": min(found), "mean": mean})
    return rows


def overhead() -> list[dict[str, Any]]:
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    causal = masks.causal()
    seconds = interleaved(
        {
            "F.scaled_dot_product_attention": lambda: scaled_dot_product_attention(q, k, v),
            "regard.attention": lambda: regard.attention(q, k, v),
            "regard.attention, causal": lambda: regard.attention(q, k, v, mask=causal),
            "regard.trace": lambda: regard.trace(q, k, v),
            "regard.trace, causal": lambda: regard.trace(q, k, v, mask=causal),
        },
        300,
    )
    return [{"call on [1, 1, 4, 8]": name, "µs": s * 1e6} for name, s in seconds.items()]


PEAK = """
import torch, regard
def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024
q = k = v = torch.randn(1, 1, {n}, 64)
t = regard.trace(q[:, :, :256], k[:, :, :256], v[:, :, :256], mask=regard.masks.causal())
t.received(); t.map(16); t.top(8)
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # forget the peak of the imports
t = regard.trace(q, k, v, mask=regard.masks.causal())
traced = memory("VmHWM") - before
t.received(); t.map(256); t.top(8)
print(traced, memory("VmHWM") - before)
"""


def memory(lengths: list[int]) -> list[dict[str, Any]]:
    rows = []
    for n in lengths:
        out = subprocess.run(
            [sys.executable, "-c", PEAK.format(n=n)], capture_output=True, text=True, check=True
        ).stdout.split()
        trace, asked = (int(x) / 2**20 for x in out)
        rows.append(
            {
                "n": n,
                "trace MiB": trace,
                "with received, map(256), top(8) MiB": asked,
                "n×n float32 MiB": n * n * 4 / 2**20,
            }
        )
    return rows


def imports(repeats: int) -> list[dict[str, Any]]:
    def start(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], check=True)

    seconds = interleaved(
        {"torch": lambda: start("import torch"), "regard": lambda: start("import regard")}, repeats
    )
    ratio = seconds["regard"] / seconds["torch"]
    return [
        {"import": "torch", "s": seconds["torch"], "ratio": 1.0},
        {"import": "regard", "s": seconds["regard"], "ratio": ratio},
    ]


def main() -> None:
    if "--half" in sys.argv:
        only_half()
        return
    quick = "--quick" in sys.argv
    with torch.no_grad():
        tables = {
            "Forward, 8 heads, width 64, float32 (higher is better)": speed(
                [1024, 2048] if quick else [64, 256, 1024, 2048, 8192], 5 if quick else 15
            ),
            "Half precision, 8 heads, width 64": half(128 if quick else 256),
            "Fixed cost of a call": overhead(),
            "Peak memory beside the inputs, 1 head, width 64, causal": memory(
                [4096] if quick else [4096, 16384, 65536]
            ),
            "Import": imports(3 if quick else 9),
        }
    tables["Forward and backward, float32 (higher is better)"] = training(
        TRAINING[-2:-1] if quick else TRAINING
    )
    tables["Worst and mean"] = worst(tables)
    machine = platform.machine()
    write("cpu" if machine == "x86_64" else f"cpu_{machine}", tables)


if __name__ == "__main__":
    main()
