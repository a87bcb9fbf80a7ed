"""What monitoring costs a step of training: forward, backward and optimiser.

PYTHONPATH=src python -m benchmarks.models.monitoring [--device cuda] [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard
from benchmarks.measurement import ratios, write
from benchmarks.models.written_model import Written

EVERY = 50
"""How many steps make a report, as by default."""


def build(kind: str, sizes: tuple[int, int, int, int], device: str) -> nn.Module:
    layers, width, heads, n = sizes
    torch.manual_seed(0)
    if kind == "by hand":
        return Written(*sizes).to(device)
    config = transformers.GPT2Config(
        vocab_size=1024, n_layer=layers, n_embd=width, n_head=heads, n_positions=n,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")
    return model.train().to(device)


def training(model: nn.Module, ids: Tensor, **how: Any) -> Callable[[int], None]:
    """Steps of training a model, monitored if it is said how."""
    cuda = ids.device.type == "cuda"
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    monitor = regard.Monitor(model, every=EVERY, rules=(), **how) if how else None

    def run(many: int) -> None:
        for _ in range(many):
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=cuda):
                out = model(ids)
                logits = out if isinstance(out, Tensor) else out.logits
                loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            if monitor is not None:
                monitor.step()
        if cuda:
            torch.cuda.synchronize()

    return run


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "again": {},
    "by default (every tenth step)": {"look": 10},
    "every step": {"look": 1},
    "every step, QK-clip": {"look": 1, "qk_clip": 100.0},
}


def steps(device: str, quick: bool) -> list[dict[str, Any]]:
    """The whole step, of a model of transformers and of one written by hand. As many steps are
    timed at once as make whole turns of what the monitor does."""
    sizes, batch = ((12, 768, 12, 1024), 8) if device == "cuda" else ((4, 64, 4, 64), 2)
    many = 10 if quick else EVERY
    ids = torch.randint(
        1024, (batch, sizes[-1]), generator=torch.Generator().manual_seed(0)
    ).to(device)  # fmt: skip
    rows = []
    for kind in ("transformers", "by hand"):
        runs = {
            name: training(build(kind, sizes, device), ids, **how) for name, how in CASES.items()
        }
        once = {name: lambda run=run: run(many) for name, run in runs.items()}
        found = ratios(once, 3)
        rows.append({"model": kind} | found | {"plain ms": found["plain ms"] / many})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="short and not kept")
    options = parser.parse_args()
    cpu = options.device == "cpu"
    about = {"model": "GPT-2 small's shape" + (", smaller" if cpu else ", 8 × 1,024 tokens, bf16")}
    if not cpu:
        about["gpu"] = torch.cuda.get_device_name()
    tables = {"A step of training (times as long)": steps(options.device, options.quick)}
    name = "monitoring" if cpu else "monitoring_gpu"
    if options.quick:
        write(name, tables, about, None)
    else:
        write(name, tables, about)


if __name__ == "__main__":
    main()
