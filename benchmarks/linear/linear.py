"""Linear attention beside fused attention and the plain n×n form: time, memory, and how far random
features are from softmax. Causal, one thread's seconds of the processor, each form run once: a busy
machine makes them longer, and what the first call of a kind loads (some 25 MiB) is in them.

python -m benchmarks.linear.linear [--quick] [--device cuda [--gates]]
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

import regard
from benchmarks.measurement import RESULTS, write
from regard import linear, masks, scores
from regard.backends.tiled.loop import inner_loop

HEADS, WIDTH = 2, 64
CAUSAL, WINDOW = masks.causal(), masks.causal() & masks.window(256)
PLAIN = 4096
"""The n×n forms, and those that go token by token, are run up to this length."""
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (linear.elu_plus_one(q) @ linear.elu_plus_one(k).mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


def plain_gated(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    total = log_decay.cumsum(-1)
    faded = (total[..., :, None] - total[..., None, :]).tril().exp()
    return (q @ k.mT * WIDTH**-0.5 * faded).tril() @ v


def stepped(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None
) -> Tensor:
    """Gates and the delta rule as they are written down: one token after the other."""
    state, outs = q.new_zeros(*q.shape[:2], WIDTH, WIDTH), []
    for i in range(q.shape[2]):
        if log_decay is not None:
            state = state * log_decay[:, :, i, None, None].exp()
        key, value = k[:, :, i, :, None], v[:, :, i, None]
        if beta is not None:
            value = beta[:, :, i, None, None] * (value - key.mT @ state)
        state = state + key * value
        outs.append(q[:, :, i, None] * WIDTH**-0.5 @ state)
    return torch.cat(outs, 2)


def forms(n: int) -> dict[str, Form]:
    features = linear.random_features(WIDTH, 128)
    head = torch.full((1, HEADS, n), 0.95).log()
    channel = head[..., None].expand(1, HEADS, n, WIDTH)
    half = torch.full((1, HEADS, n), 0.5)
    return {
        "fused": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        "n×n": plain,
        "elu + 1": lambda q, k, v: linear.attention(q, k, v, mask=CAUSAL),
        "128 random": lambda q, k, v: linear.attention(q, k, v, mask=CAUSAL, features=features),
        "elu + 1, window 256": lambda q, k, v: linear.attention(q, k, v, mask=WINDOW),
        "gated by head": lambda q, k, v: linear.gated(q, k, v, head),
        "gated by channel": lambda q, k, v: linear.gated(q, k, v, channel),
        "delta rule": lambda q, k, v: linear.delta(q, normalize(k, dim=-1), v, half),
        "gated by head, n×n": lambda q, k, v: plain_gated(q, k, v, head),
        "gated by head, token by token": lambda q, k, v: stepped(q, k, v, head, None),
        "delta rule, token by token": lambda q, k, v: stepped(
            q, normalize(k, dim=-1), v, None, half
        ),
    }


def memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measured(form: Form, inputs: list[Tensor], *, backward: bool) -> tuple[float, float]:
    """Seconds of the processor, and MiB held at most beside the inputs, in a process of its own:
    memory that another form gave back would be used again unseen."""
    source, sink = os.pipe()
    child = os.fork()
    if child:
        os.close(sink)
        with os.fdopen(source) as answer:
            seconds, mib = map(float, answer.read().split())
        os.waitpid(child, 0)
        return seconds, mib
    start, before = time.process_time(), memory("VmRSS")
    out = form(*inputs)
    if backward:
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    os.write(sink, f"{time.process_time() - start} {memory('VmHWM') - before}".encode())
    os._exit(0)


def compared(lengths: list[int], *, backward: bool) -> list[dict[str, Any]]:
    rows = []
    for n in lengths:
        source = torch.Generator().manual_seed(0)
        inputs = [
            torch.randn(1, HEADS, n, WIDTH, generator=source).requires_grad_(backward)
            for _ in range(3)
        ]
        for name, form in forms(n).items():
            if ("n×n" in name or "token" in name) and n > PLAIN:
                continue
            seconds, mib = measured(form, inputs, backward=backward)
            rows.append({"n": n, "form": name, "CPU-s": seconds, "peak MiB": mib})
    return rows


def random_errors(counts: list[int]) -> list[dict[str, Any]]:
    """|random features - softmax| / |softmax| of outputs, over 4 draws of features."""
    rows = []
    for spread in (0.25, 0.5, 1.0):
        source = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 4, 512, WIDTH, generator=source) for _ in range(3))
        # Logits q·k / √D then have this standard deviation.
        q, k = q * math.sqrt(spread), k * math.sqrt(spread)
        truth = regard.attention(q, k, v, mask=CAUSAL)
        row: dict[str, Any] = {"standard deviation of logits": spread}
        for count in counts:
            found = [
                linear.attention(
                    q, k, v, mask=CAUSAL, features=linear.random_features(WIDTH, count, seed=s)
                )
                for s in range(4)
            ]
            error = torch.stack(found) - truth
            row[f"{count} features"] = float(error.norm() / (2 * truth.norm()))
        kernel = linear.attention(q, k, v, mask=CAUSAL)
        row["elu + 1, no approximation"] = float((kernel - truth).norm() / truth.norm())
        rows.append(row)
    return rows


def additive(length: int, widths: list[int]) -> list[dict[str, Any]]:
    """Additive attention in the compiled loop and in PyTorch's operations, one head: seconds of the
    processor, of a second call, and how far outputs and gradients are from each other."""
    rows = []
    loop, why_not = inner_loop.found()
    for width in widths:
        source = torch.Generator().manual_seed(0)
        shapes = [(1, 1, length, width)] * 3 + [(width,)]
        inputs = [torch.randn(shape, generator=source).requires_grad_() for shape in shapes]
        one = torch.eye(width)

        def run(inputs: list[Tensor] = inputs, one: Tensor = one) -> Tensor:
            score = scores.additive(one, one, inputs[3])
            return regard.attention(*inputs[:3], score=score, backend="tiled")

        def learn(run: Callable[[], Tensor] = run, inputs: list[Tensor] = inputs) -> list[Tensor]:
            out = run()
            return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

        row: dict[str, Any] = {"n": length, "units": width}
        answers = []
        for name in ("compiled", "PyTorch"):
            if loop is None and name == "compiled":
                row["compiled"] = why_not
                continue
            if loop is not None:
                loop.compares_units = name == "compiled"
            answers.append(learn())
            with torch.no_grad():
                row[f"{name} forward CPU-s"] = processor_seconds(run)
            row[f"{name} with backward CPU-s"] = processor_seconds(learn)
        if loop is not None:
            loop.compares_units = True
            pairs = zip(*answers, strict=True)
            row["apart at most"] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        rows.append(row)
    return rows


def processor_seconds(run: Callable[[], Any]) -> float:
    run()
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="fewer and shorter sequences")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--gates", action="store_true", help="on cuda: gates and the delta rule")
    options.add_argument("--out", type=Path, default=RESULTS, help="folder for --gates")
    asked = options.parse_args()
    quick = asked.quick
    if asked.device == "cuda":
        from benchmarks.linear import linear_gpu

        if asked.gates:
            linear_gpu.main_gates(quick=quick, folder=asked.out)
        else:
            linear_gpu.main(quick=quick)
        return
    torch.set_num_threads(1)
    lengths = [1024] if quick else [1024, 4096, 16384]
    with torch.no_grad():
        tables = {
            "Forward, 2 heads, width 64, float32, causal": compared(lengths, backward=False),
            "Error of random features, as a share of softmax attention's output": random_errors(
                [64, 256] if quick else [64, 256, 1024]
            ),
        }
    tables["Forward and backward"] = compared(lengths, backward=True)
    tables["Additive attention, one head, float32"] = additive(1000, [64] if quick else [64, 256])
    machine = platform.machine()
    write("linear" if machine == "x86_64" else f"linear_{machine}", tables)


if __name__ == "__main__":
    main()
