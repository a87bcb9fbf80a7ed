"""The command `regard cost`, and what `regard doctor --measure` does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from regard.cost import DEVICES, PRESETS, Configuration, compare, device, model, preset
from regard.cost.rates import Device
from regard.cost.tables import table
from regard.cost.this_machine import keep, measure
from regard.cost.units import counted, sized
from regard.errors import RegardError
from regard.files import is_there
from regard.visible import visible


def cost(
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="A known model, or the path of a Hugging Face config.json. Can be given again.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        str, typer.Option(help="Tokens: 8192, or 128k (131,072), or 1M (1,048,576).")
    ] = "8k",
    batch: Annotated[int, typer.Option(help="Texts read at once.")] = 1,
    on: Annotated[
        str,
        typer.Option("--device", help="A known device, or here (see regard doctor --measure)."),
    ] = "H100 SXM",
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16 or float32 instead of the model's own."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw it against the context, into a .png, .svg or .pdf file."),
    ] = None,
) -> None:
    """What reading a context with a model costs: FLOPs, bytes, memory, cache, time at best.

    Nothing is run or loaded: all is counted from sizes. Several models are shown side by side;
    without one, the models and devices that are known are listed.
    """
    if not models:
        typer.echo(_known())
        return
    found = [_configuration(name) for name in models]
    if dtype is not None:
        found = [c.but(dtype=dtype) for c in found]
    where = device(on)
    costs = [model(c, context, batch=batch, device=where) for c in found]
    shown = costs[0] if len(costs) == 1 else compare(costs)
    typer.echo(shown.json() if json else visible(str(shown)))
    if plot is not None:
        _draw(found, context, batch, where, plot)


def measure_here() -> str:
    """Measure this machine, keep it as the device "here", and say what was found."""
    with _progress() as bar:
        task = bar.add_task("measuring", total=None)
        found = measure(progress=lambda what: bar.update(task, description=f"measuring {what}"))
    path = keep(found)
    rows = [[name, f"{counted(rate)}FLOP/s"] for name, rate in found.rates.items()]
    rows.append(["copies", f"{counted(found.bandwidth)}B/s"])
    return f"{found.about}\n{table(rows)}\nkept in {path}: regard cost --device here"


def _configuration(name: str) -> Configuration:
    if name.endswith(".json") or os.sep in name or is_there(Path(name)):
        return Configuration.from_json(name)
    return preset(name)


def _draw(found: list[Configuration], context: str, batch: int, on: Device, path: Path) -> None:
    with _progress() as bar:
        bar.add_task(f"drawing {path.name}", total=None)
        # Imported late: matplotlib takes a second, and is not everywhere.
        from regard.view.pictures.cost_plot import cost_plot, save

        save(cost_plot(found, context, batch=batch, device=on), path)
    typer.echo(f"\ndrawn into {path}", err=True)


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip


def _known() -> str:
    models = [["model", "parameters", "layers", "heads", "key heads", "cache a token"]]
    for c in PRESETS.values():
        cache = sized(2 * c.layers * c.key_heads * c.head_width * c.itemsize)
        sizes = (c.layers, c.heads, c.key_heads)
        models.append([c.name, counted(c.parameters), *map(str, sizes), cache])
    devices = [["device", "bfloat16", "float32", "memory moves", "memory"]]
    for d in [*DEVICES.values(), *_here()]:
        rates = (f"{counted(d.rate(dtype))}FLOP/s" for dtype in ("bfloat16", "float32"))
        memory = "–" if d.memory is None else f"{counted(d.memory)}B"
        devices.append([d.name, *rates, f"{counted(d.bandwidth)}B/s", memory])
    hint = "regard cost --model llama-3-8b --context 128k --device H100"
    return "\n\n".join([table(models, rules=(1,)), table(devices, rules=(1,)), f"try: {hint}"])


def _here() -> list[Device]:
    try:
        return [device("here")]
    except RegardError:
        return []
