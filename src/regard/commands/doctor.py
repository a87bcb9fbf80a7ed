"""The command `regard doctor`."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Annotated

import torch
import typer
from rich import box
from rich.table import Table
from rich.text import Text

import regard
from regard import masks
from regard.backends.triton.launches import shipped
from regard.commands.console import plain_console
from regard.commands.cost import measure_here


def doctor(
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure this machine, for regard cost --device here."),
    ] = False,
) -> None:
    """Versions, devices, and which backends run here and why the others do not."""
    console = plain_console()
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, fact in _facts():
        facts.add_row(Text(name), Text(fact))
    console.print(facts)
    for device, dtype in _devices():
        q = torch.zeros(1, 8, 1024, 64, device=device, dtype=dtype)
        plans = [
            regard.plan(q, q, q, mask=masks.causal(), statistics=statistics)
            for statistics in (False, True)
        ]
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
        for heading in ("backend", "attention", "trace"):
            table.add_column(heading)
        for name in regard.calls.dispatch.BACKENDS:
            table.add_row(name, *(Text(_verdict(plan, name)) for plan in plans))
        console.print(Text(f"\n{plans[0].call.removeprefix('attention of ')}"))
        console.print(table)
        loops = {f"inner loop of {p.backend}: {p.inner_loop}": p for p in plans if p.inner_loop}
        for line in loops:
            console.print(Text(line))
    if measure:
        console.print(Text(f"\n{measure_here()}"))


def _facts() -> list[tuple[str, str]]:
    found = [
        ("regard", regard.__version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
    ]
    try:
        found.append(("triton", installed("triton")))
    except PackageNotFoundError:
        found.append(("triton", "not installed"))
    found.append(("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores"))
    gpus = [
        f"{p.name} ({p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}, "
        f"{shipped.count(10 * p.major + p.minor)} kernels come compiled)"
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*found, ("devices", "\n".join(["cpu", *gpus, *mps]))]


def _devices() -> list[tuple[str, torch.dtype]]:
    cuda = [("cuda", torch.bfloat16)] if torch.cuda.is_available() else []
    mps = [("mps", torch.float32)] if torch.backends.mps.is_available() else []
    return [("cpu", torch.float32), *cuda, *mps]


def _verdict(plan: regard.Plan, name: str) -> str:
    if plan.backend == name:
        return "runs"
    return "; ".join(plan.refusals[name]) or "could, but ranks lower"
