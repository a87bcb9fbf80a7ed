"""Every head of a model in the terminal: small grids of layers × heads, one for each statistic."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.text import Text

from regard.errors import RegardError
from regard.interpret.two_texts import CROSS
from regard.seen import Seen
from regard.traces import Trace
from regard.view.atlas import (
    KEEP,
    STATISTICS,
    HeadFigures,
    Statistic,
    Weights,
    fit,
    head_figures,
)
from regard.view.terminal.colours import glyph, ground
from regard.view.terminal.heat_maps import colourless

GAP = 3
MANY = 12
"""Kinds of layers that are told one by one, where no two are alike."""
MEANING = {
    "entropy": "how spread a row is, in percent of the most",
    "sink": "what falls on the first token, in percent",
    "distance": "how far a row looks, in tokens",
    "logit": "the largest of the head",
}


def head_grid(
    what: Seen | Trace | Weights | HeadFigures,
    statistics: Sequence[str] | None = None,
    *,
    numbers: bool = False,
    plain: bool = False,
) -> HeadGrid:
    """Layers × heads as something rich can print, one small grid for each statistic.

    `statistics` are some of entropy, sink, distance and logit; without it the first three, or,
    where only statistics were kept, all but the distance, which is not known then. Grids stand side
    by side where the console has room. `numbers` writes into each cell what its colour says.
    `plain` draws with ASCII even where there is colour.

    >>> import regard, torch
    >>> from rich.console import Console
    >>> x = torch.eye(4).expand(1, 3, 4, 4) * torch.tensor([1, 2, 30]).view(1, 3, 1, 1)
    >>> t = regard.trace(x, x, x, mask=regard.masks.causal())
    >>> Console(width=70).print(head_grid(t, numbers=True, plain=True))
    entropy          sink             distance
         0   1   2        0   1   2        0   1   2
    0   97  61   0   0   47  33  25   0  0.6 0.3 0.0
    <BLANKLINE>
    rows: layers, columns: heads
    entropy: how spread a row is, in percent of the most
    sink: what falls on the first token, in percent
    distance: how far a row looks, in tokens
    """
    for name in statistics or ():
        if name not in STATISTICS:
            raise RegardError(
                "unknown statistic", got=repr(name), accepted=", ".join(map(repr, STATISTICS))
            )
    if not isinstance(what, HeadFigures):
        what = head_figures(what)
    wanted = what.shown if statistics is None else statistics
    chosen = tuple(name for name in STATISTICS if name in wanted)
    return HeadGrid(what, chosen, numbers, plain)


@dataclass(frozen=True)
class HeadGrid:
    """Numbers of every head, drawn when they are printed."""

    figures: HeadFigures
    statistics: tuple[Statistic, ...]
    numbers: bool = False
    plain: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        plain = self.plain or colourless(console)
        width, layers = options.max_width, len(self.figures.paths)
        label = len(str(layers - 1)) + 1
        many = self.figures.heads
        cell = 4 if self.numbers else 2 if label + 2 * many <= width else 1
        room = max(1, (width - label) // cell)
        heads = [range(a, min(a + room, many)) for a in range(0, many, room)]
        panels = [
            self._panel(name, part, label, cell, plain)
            for name in self.statistics
            for part in heads
        ]
        across = max(1, (width + GAP) // (label + cell * min(room, many) + GAP))
        for first in range(0, len(panels), across):
            beside = panels[first : first + across]
            for lines in zip(*beside, strict=True):
                yield Text(" " * GAP, no_wrap=True, overflow="crop").join(lines)
            yield Text()
        yield from self._legend(plain)

    def _panel(
        self, name: Statistic, heads: range, label: int, cell: int, plain: bool
    ) -> list[Text]:
        """One statistic of some heads: a title, the numbers of the heads, and a row for a layer."""
        grid, most = self.figures.of(name), self._most(name)
        wide = label + cell * len(heads)
        lines = [_line(fit(name, wide, "~"), "" if plain else "bold"), _line(" " * label)]
        step = 1 if cell > 2 else 10 // cell
        for head in heads:
            shown = str(head) if (head - heads.start) % step == 0 else ""
            if cell > 2:
                shown = shown.rjust(cell)
            room = min(cell * step, cell * (heads.stop - head))
            if shown:
                lines[1].append(fit(shown, room, ""))
        lines[1].append(" " * (wide - lines[1].cell_len))
        for layer, row in enumerate(grid):
            line = _line(str(layer).rjust(label - 1) + " ")
            for head in heads:
                value = row[head] if head < len(row) else math.nan
                share = max(0.0, value / most) if most > 0 else 0.0
                number = _number(name, value, self.figures.normalised) if cell > 2 else ""
                if math.isnan(value):
                    line.append((number or " ").rjust(cell))
                elif plain:
                    line.append(number.rjust(cell) if cell > 2 else glyph(share) * cell)
                else:
                    line.append(number.rjust(cell), ground(share))
            lines.append(line)
        return lines

    def _most(self, name: Statistic) -> float:
        """What the brightest colour stands for."""
        if name == "sink" or (name == "entropy" and self.figures.normalised):
            return 1.0
        known = [v for row in self.figures.of(name) for v in row if not math.isnan(v)]
        return max(known, default=0.0)

    def _legend(self, plain: bool) -> Iterator[Text]:
        style = "" if plain else "dim"
        yield Text("rows: layers, columns: heads", style)
        for rows, kind in kinds_of(self.figures.paths):
            yield Text(f"{rows}: {kind}", style)
        for name in self.statistics:
            says = MEANING[name]
            if name == "entropy" and not self.figures.normalised:
                says = "how spread a row is, in nats"
            if not self.figures.knows(name):
                says = "not known: only statistics were kept"
            elif not self.numbers:
                top = _number(name, self._most(name), self.figures.normalised)
                says += f"; {'. to @' if plain else 'dark to bright'}: 0 to {top}"
            yield Text(f"{name}: {says}", style)
        if not self.figures.normalised:
            yield Text(f"weights are had by {KEEP}", style)


def kinds_of(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Which rows are layers of which kind, where there are several: paths that differ in numbers
    alone are of one.

    >>> kinds_of(["encoder.0", "encoder.1", "decoder.0.own", "decoder.0.memory"])
    [('0, 1', 'encoder.*'), ('2', 'decoder.*.own'), ('3', 'decoder.*.memory, cross-attention')]
    >>> kinds_of(["layers.0.attention", "layers.1.attention"])
    []
    >>> kinds_of(["decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"])[1]  # PyTorch's
    ('1', 'decoder.layers.*.multihead_attn, cross-attention')
    """
    rows: dict[str, list[str]] = {}
    for row, path in enumerate(paths):
        rows.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", path), []).append(str(row))
    if len(rows) < 2 or len(rows) == len(paths) > MANY:
        return []
    return [
        (", ".join(numbers), f"{kind}, cross-attention" if CROSS.search(kind) else kind)
        for kind, numbers in rows.items()
    ]


def _number(name: Statistic, value: float, normalised: bool) -> str:
    """A number in three cells."""
    if math.isnan(value):
        return "-"
    if name == "sink" or (name == "entropy" and normalised):
        return f"{100 * value:.0f}"
    if value < 0:
        return str(max(round(value), -99))
    if value < 9.95:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 999.5 else f"{min(value / 1000, 999):.0f}k"


def _line(text: str, style: str = "") -> Text:
    line = Text(no_wrap=True, overflow="crop")
    return line.append(text, style)
