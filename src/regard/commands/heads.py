"""The command `regard heads`."""

from __future__ import annotations

import json as json_text
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from regard.commands.console import plain_console, progress_bar, shown_on
from regard.commands.named_subject import text_of
from regard.errors import RegardError
from regard.files import finite_or_null
from regard.interpret.head_scores import HeadScores, Links
from regard.interpret.head_scores import heads as score_heads
from regard.interpret.head_scores.tables.score_names import shown
from regard.lab.material.text import king_james
from regard.models.named_models import load
from regard.models.readers import Reader
from regard.seen import shown as size_of

PASSAGES, VERSES = 64, 4
BEST = 3
"""Heads that are named for each score."""
LINKED = 8
"""Heads that are named for each link."""


def heads(
    model: Annotated[
        str,
        typer.Option(
            help="regard-small, regard-king-james, a folder that holds a Hugging Face model, or "
            "its name on the hub."
        ),
    ] = "regard-small",
    texts: Annotated[
        str | None,
        typer.Option(
            help="A file with a text a line; - is standard input. Without it, 64 passages of the "
            "King James Bible.",
            show_default=False,
        ),
    ] = None,
    link: Annotated[
        tuple[str, str] | None,
        typer.Option(
            help="Two words: which heads look from the first at the second?", show_default=False
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="All numbers, as JSON.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Draw layers × heads into a .svg, .png or .pdf.", show_default=False
        ),
    ] = None,
    random: Annotated[
        bool, typer.Option(help="Compare with the same model with its weights in random order.")
    ] = True,
    dtype: Annotated[
        str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="auto (CUDA where there is one), cpu, cuda.")
    ] = "auto",
) -> None:
    """What each head of a model does: looks at the token before, at what followed, …

    A word for each head, the heads that have most of each score, and, with --link, those that look
    from one word at another.
    """
    given = None if texts is None else lines_of(texts)
    if out is not None:
        # Before the work: matplotlib is an extra, and may be missing.
        from regard.view.pictures import head_scores_picture, theme

        theme.format_of(out)
    with progress_bar() as bar:
        task = bar.add_task("loading", total=None)
        reader = load(model, dtype=dtype, device=device, progress=shown_on(bar, task))
        bar.update(task, description="reading")
        found = score_heads(
            reader, given or passages(reader), links=[link] if link else (), random=random,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    if json:
        typer.echo(json_text.dumps(plain(found, model)))
    else:
        _print(found, model)
    if out is not None:
        picture = head_scores_picture.head_scores_picture(found, title=model)
        head_scores_picture.save(picture, out)
        typer.echo(f"drawn into {out} ({size_of(out.stat().st_size)})", err=True)


def passages(reader: Reader) -> list[str]:
    """What is read where no text is named; of each as much as the model can read."""
    verses = king_james().splitlines()
    step = len(verses) // PASSAGES
    found = [" ".join(verses[i * step : i * step + VERSES]) for i in range(PASSAGES)]
    return found if reader.longest is None else [_beginning(reader, text) for text in found]


def _beginning(reader: Reader, text: str) -> str:
    """As much of a text as a model can read."""
    words = text.split()
    while True:
        try:
            reader.ids(" ".join(words))
        except RegardError:
            if len(words) == 1:
                raise
            words = words[: len(words) * 3 // 4]
        else:
            return " ".join(words)


def lines_of(name: str) -> list[str]:
    """The texts of a file, one a line."""
    found = [line for line in text_of(name).splitlines() if line.strip()]
    if not found:
        raise RegardError("there is no text in the file", got=name, accepted="a text a line")
    return found


def plain(found: HeadScores, model: str) -> dict[str, Any]:
    """Everything as plain values."""
    everything: dict[str, Any] = finite_or_null(
        {
            "model": model,
            "texts": found.texts,
            "layers": list(found.paths),
            "badges": [list(row) for row in found.badges()],
            "heads": found.records(),
            "links": found.links.records(),
            "notes": [*found.notes, *found.links.notes],
        }
    )
    return everything


def _print(found: HeadScores, model: str) -> None:
    console = plain_console()
    many = f"{found.texts} texts" if found.texts > 1 else "one text"
    console.print(Text(f"{model}: {len(found)} heads of {len(found.paths)} layers, {many}\n"))
    if found.links:
        console.print(_links(found.links))
        console.print()
    console.print(_badges(found))
    console.print()
    console.print(_best(found))
    for note in (*found.notes, *found.links.notes):
        console.print(Text(note))


def _badges(found: HeadScores) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    badges = found.badges()
    table.add_column("layer", justify="right")
    for head in range(max(map(len, badges))):
        table.add_column(f"head {head}")
    for layer, row in enumerate(badges):
        table.add_row(str(layer), *(Text(word or "·") for word in row))
    return table


def _best(found: HeadScores) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("score", "most in", "", "95 % interval", "then", "random weights"):
        table.add_column(name, justify="left" if name in ("score", "most in", "then") else "right")
    for name in found.names:
        ranked = [row for row in found.sorted(name) if not math.isnan(row[name])][:BEST]
        best = ranked[0].scores[name]
        interval = "–"
        if not math.isnan(best.low):
            interval = f"{shown(name, best.low)} to {shown(name, best.high)}"
        then = ", ".join(f"{row.layer}.{row.head} {shown(name, row[name])}" for row in ranked[1:])
        place = f"{ranked[0].layer}.{ranked[0].head}"
        if name == "offset":
            place += f" ({ranked[0].offset:+d})"
        table.add_row(
            *map(Text, (name, place, shown(name, best.value), interval, then,
                        shown(name, best.random)))
        )  # fmt: skip
    return table


def _links(links: Links) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    rows = links[:LINKED]._table()
    for i, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if i < 2 else "right")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table
