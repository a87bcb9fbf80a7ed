"""The command `regard scan`."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from regard.commands.console import plain_console
from regard.interpret.head_scores.tables.score_names import shown
from regard.notices import at_terminal
from regard.scanning import OBSERVED, STATISTICS, Job, Options, Scan, observed, view_command
from regard.scanning import scan as scan_corpus

BEST = 3
"""Heads that are named for each number."""
PICTURE = "heads.svg"


def scan(
    model: Annotated[
        str,
        typer.Option(
            help="regard-small, a folder that holds a Hugging Face model, or its name on the hub."
        ),
    ],
    texts: Annotated[
        list[str],
        typer.Option(
            help="A file with a text a line, or lines of JSON with a text each (.jsonl); a folder "
            "of such files, or a pattern in quotes. Can be given again."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The folder to write; a scan that it holds is resumed."),
    ],
    observe: Annotated[
        str | None,
        typer.Option(
            help=f"What of every row, with commas between: {', '.join(OBSERVED)}. Without it, all.",
            show_default=False,
        ),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            help="Files (shards) that the work is split into; else one for every 64 texts.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(help="Only modules of this path; * matches anything. Can be given again."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Read so many tokens of each text; else all that the model can read.",
            show_default=False,
        ),
    ] = None,
    ray: Annotated[
        int | None,
        typer.Option(help="Read with so many actors of Ray.", show_default=False),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads of each process on a CPU; last bits of sums depend on it. Else those "
            "that the scan was begun with, or what PyTorch takes.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds without any rank reading anything, before giving up.")
    ] = 600.0,
    dtype: Annotated[
        str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="auto (CUDA where there is one), cpu, cuda.")
    ] = "auto",
) -> None:
    """Statistics of every head of a model over a corpus of texts.

    Started again, also after it was killed, it goes on where it was. Under torchrun the ranks share
    the work; the numbers are the same to the last bit.
    """
    options = Options(observed(observe), shards, tuple(layers or ["*"]), max_tokens, threads)
    job = Job(model, tuple(texts), str(out), options, dtype, device)
    with _Bar() as bar:
        if ray is None:
            found = scan_corpus(job, progress=bar.progress, timeout=timeout)
        else:
            # Imported late: Ray is an extra, and takes its time.
            from regard.scanning.ray_pool import scan_on_ray

            found = scan_on_ray(job, ray, progress=bar.progress)
    if found is not None:
        _print(found, job, out)


class _Bar:
    """Progress of a scan: how far it is, how fast, and what remains. Only at a terminal, and on one
    rank."""

    def __init__(self) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(),
            TextColumn("{task.fields[count]}"), TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(), console=Console(stderr=True), transient=True,
            disable=not at_terminal() or os.environ.get("RANK", "0") != "0",
        )  # fmt: skip
        self.task = self.bar.add_task("loading", total=None, count="", speed="")

    def __enter__(self) -> _Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def progress(self, done: int, total: int, tokens: int) -> None:
        task, spent = self.bar.tasks[0], 0.0
        if task.total is None:
            self.bar.reset(self.task, total=total, description="reading")
        else:
            spent = task.elapsed or 0.0
        speed = f"{tokens / spent:,.0f} tokens/s" if spent > 0 else ""
        self.bar.update(self.task, completed=done, count=f"{done}/{total} texts", speed=speed)


def _print(found: Scan, job: Job, out: Path) -> None:
    console = plain_console()
    console.print(
        Text(
            f"{job.model}: {len(found)} heads of {len(found.paths)} layers, {found.texts} texts, "
            f"{found.tokens} tokens\n"
        )
    )
    if found.cut:
        console.print(Text(f"of {found.cut} texts only the beginning was read\n"))
    console.print(_best(found))
    console.print()
    largest = [e for e in found.extremes if (e.statistic, e.end) == ("max_logit", "most")]
    if largest:
        best = max(largest, key=lambda e: e.value)
        command = view_command(best, job.model, out)
        console.print(Text(f"the largest logit, {best.value:.1f}:\n{command}\n"), soft_wrap=True)
    written = "heads.jsonl, extremes.jsonl"
    if find_spec("pyarrow") is not None:
        written += ", heads.parquet"
    if find_spec("matplotlib") is not None:
        _draw(found, job.model, out / PICTURE)
        written += f", {PICTURE}"
    console.print(Text(f"written into {out}: {written}"))


def _draw(found: Scan, title: str, path: Path) -> None:
    # Imported late: matplotlib is an extra, and takes its time.
    from regard.view.pictures import scan_picture

    scan_picture.save(scan_picture.scan_picture(found, title=title), path)


def _best(found: Scan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "most in", "mean", "deviation", "median", "99 %", "then"):
        table.add_column(name, justify="left" if name in ("", "most in", "then") else "right")
    for name in found.names:
        ranked = [head for head in found.sorted(name) if not math.isnan(head[name])][:BEST]
        if not ranked:
            continue
        best = ranked[0]
        more = ["", "", ""]
        if name in best.statistics:
            s = best.statistics[name]
            more = [
                _shown(name, s.deviation),
                _shown(name, s.quantiles[0.5]),
                _shown(name, s.quantiles[0.99]),
            ]
        then = ", ".join(
            f"{head.layer}.{head.head} {_shown(name, head[name])}" for head in ranked[1:]
        )
        table.add_row(
            *map(Text, (name, f"{best.layer}.{best.head}", _shown(name, best[name]), *more, then))
        )
    return table


def _shown(name: str, value: float) -> str:
    """A number as the table says it: statistics as they are, scores as shares."""
    return f"{value:.3g}" if name in STATISTICS else shown(name, value)
