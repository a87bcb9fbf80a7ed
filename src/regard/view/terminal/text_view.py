"""A subject as text: its heads, one of them as a map, and a token of it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from regard.seen import Seen
from regard.view.atlas import clean, layer_of, only_statistics
from regard.view.subjects import Look
from regard.view.terminal.head_grids import head_grid
from regard.view.terminal.heat_maps import HeatMap, colourless, shading


def show(this: Look, console: Console) -> None:
    """Everything about a subject that fits into a terminal."""
    subject, wanted, chosen = this.subject, this.wanted, this.chosen
    plain = wanted.plain or colourless(console)
    bold, dim = ("", "") if plain else ("bold", "dim")
    console.print(Text(subject.title, bold))
    console.print(Text(subject.about + "\n", dim))
    if subject.told.wrote:
        console.print(Text(f"wrote: {clean(subject.told.wrote)}\n"))
    if this.found is not None:
        console.print(head_grid(this.found, numbers=wanted.numbers, plain=plain))
        console.print()
    if chosen is None:
        kept = "only statistics were kept: there are no weights to show"
        if not only_statistics(subject.what):
            kept = "some layers are without traces: choose one that has them with --layer"
        console.print(Text(kept, bold))
        return
    if isinstance(subject.what, Seen):
        path = layer_of(subject.what, wanted.layer or 0)[1].path
        console.print(Text(f"{chosen.name}{this.why} ({path})\n", bold))
    console.print(HeatMap(chosen, plain))
    query, key = this.place
    brightest = "" if plain else ", brightest where most"
    if query is not None:
        name = f"'{chosen.queries[query]}' ({subject.unit} {chosen.shift + query + 1})"
        console.print(Text(f"\nwhat {name} looks at, in percent{brightest}", bold))
        console.print(shading(chosen, query=query, plain=plain))
    if key is not None:
        name = f"'{chosen.keys[key]}' ({subject.unit} {key + 1})"
        console.print(Text(f"\nwho looks at {name}, in percent of what each gives", bold))
        console.print(shading(chosen, key=key, plain=plain))
