"""Traces drawn in the terminal: a heat map of the weights, and a text shaded by one row of them.

What is drawn fits itself to the console it is printed on: to its width, and to its colours. Without
colours everything is said with ASCII and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

from regard.errors import RegardError
from regard.seen import Seen
from regard.traces import Trace
from regard.view.atlas import (
    CAP,
    FAINT,
    Choice,
    Figures,
    Head,
    Weights,
    centre,
    choose,
    figures,
    fit,
    given,
    got,
    runs,
    stack,
    worth_showing,
)
from regard.view.terminal.colours import GLYPHS, glyph, ground
from regard.view.terminal.map_layout import ENTROPY, SHARE, Layout, lay_out

TALLEST = 10


def heat_map(
    what: Trace | Seen | Weights,
    tokens: Sequence[str] | None = None,
    batch: int = 0,
    head: Head = 0,
    *,
    layer: int | str = 0,
    call: int | None = None,
    queries: Sequence[str] | None = None,
    plain: bool = False,
) -> HeatMap:
    """The weights of one head, or the mean of all heads, as something rich can print.

    Out of what was seen of a model, `layer` chooses by number or by path; `call` is needed where a
    layer was called more than once. `tokens` name the keys; without them they are what the model
    read, or numbers. `queries` name the queries; without them they are the last of `tokens`, as in
    self-attention and in decoding. Past 60 tokens, or where the console is too narrow, cells are
    pooled and the legend says so. `plain` draws with ASCII even where there is colour.

    >>> import regard, torch
    >>> from rich.console import Console
    >>> x = torch.eye(3) * 2
    >>> t = regard.trace(x, x, x, mask=regard.masks.causal())
    >>> Console(width=60).print(heat_map(t, ["to", "be", "or"], plain=True))  # doctest: +ELLIPSIS
               t  b  o
               o  e  r  entropy  strongest
    to       100           0.00  to        100%
    be         9 91        0.30  be         91%
    or         8  8 83     0.56  or         83%
    ...
    """
    chosen = choose(what, tokens, layer=layer, head=head, batch=batch, call=call, queries=queries)
    return HeatMap(chosen, plain)


def shaded(
    what: Trace | Seen | Weights,
    tokens: Sequence[str] | None = None,
    query: int | None = None,
    batch: int = 0,
    head: Head = 0,
    *,
    key: int | None = None,
    layer: int | str = 0,
    call: int | None = None,
    plain: bool = False,
) -> Shaded:
    """The tokens in their order, each shaded by the weight that one query gives it; or, with
    `key=`, by the weight that it gives one key: who looks at that token.

    Under each token stands its weight in percent, or nothing where it is masked. Of a text longer
    than 60 tokens only the strongest are shown, with their neighbours.

    >>> import regard, torch
    >>> from rich.console import Console
    >>> x = torch.eye(3) * 2
    >>> t = regard.trace(x, x, x, mask=regard.masks.causal())
    >>> Console(width=60).print(shaded(t, ["to", "be", "or"], query=1, plain=True))
      to   be   or
       9   91
    >>> Console(width=60).print(shaded(t, ["to", "be", "or"], key=1, plain=True))
      to   be   or
           91   8
    """
    chosen = choose(what, tokens, layer=layer, head=head, batch=batch, call=call)
    return shading(chosen, query, key, plain=plain)


def shading(
    chosen: Choice, query: int | None = None, key: int | None = None, *, plain: bool = False
) -> Shaded:
    """The tokens of a head that was chosen, shaded by one query or by one key."""
    if query is not None and key is None:
        return Shaded(chosen.keys, tuple(given(chosen.trace, query)), plain)
    if key is not None and query is None:
        before = (None,) * chosen.shift
        names = (*chosen.keys[: chosen.shift], *chosen.queries)
        return Shaded(names, (*before, *got(chosen.trace, key)), plain)
    raise RegardError(
        "a text is shaded by what one token gives, or by what it gets",
        got=f"query={query}, key={key}",
        accepted="one of query= and key=",
    )


def colourless(console: Console) -> bool:
    """Whether a console lacks the colours that a scale of weights needs."""
    return console.no_color or console.color_system not in ("256", "truecolor")


@dataclass(frozen=True, eq=False)
class HeatMap:
    """One head of one batch entry, or the mean of all, drawn when it is printed."""

    chosen: Choice
    plain: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        plain = self.plain or colourless(console)
        queries, keys = self.chosen.queries, self.chosen.keys
        longest = max(map(cell_len, (*queries, *keys, "received")))
        layout = lay_out(options.max_width, len(queries), len(keys), longest, plain=plain)
        shown = figures(self.chosen.trace, layout.rows, layout.columns)
        yield from _Drawing(self.chosen, layout, shown, plain).lines()


@dataclass(frozen=True, eq=False)
class Shaded:
    """One query's weights over a text, drawn when it is printed; None where a token is masked."""

    tokens: tuple[str, ...]
    weights: tuple[float | None, ...]
    plain: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        plain = self.plain or colourless(console)
        most = _most(w for w in self.weights if w is not None)
        names, numbers = _line(), _line()
        for token, weight in self._pieces("..." if plain else "…"):
            width = min(max(cell_len(token), 3), options.max_width - 2)
            if names.cell_len + width + 2 > options.max_width:
                yield from (names, numbers, _line())
                names, numbers = _line(), _line()
            style = ground(_share(weight, most)) if weight is not None and not plain else ""
            cut = fit(token, min(cell_len(token), width), "~" if plain else "…")
            names.append(centre(cut, width + 2), style)
            numbers.append(centre("" if weight is None else _percent(weight), width + 2))
        yield from (names, numbers)

    def _pieces(self, gap: str) -> Iterator[tuple[str, float | None]]:
        before = -1
        for place in self._worth_showing():
            if place > before + 1:
                yield gap, None
            yield self.tokens[place], self.weights[place]
            before = place
        if before + 1 < len(self.tokens):
            yield gap, None

    def _worth_showing(self) -> Sequence[int]:
        if len(self.tokens) <= CAP:
            return range(len(self.tokens))
        return worth_showing(self.weights)


@dataclass(frozen=True, eq=False)
class _Drawing:
    """A heat map with its measures and numbers settled."""

    map: Choice
    at: Layout
    shown: Figures
    plain: bool

    def lines(self) -> Iterator[Text]:
        most = _most(weight for row in self.shown.weights for weight in row)
        total = sum(self.shown.received)
        received = [_share(amount, total) for amount in self.shown.received]
        gained = _most(received)
        yield from self._heading()
        for row, name in enumerate(self._row_names()):
            line = self._label(name)
            for weight, seen in zip(self.shown.weights[row], self.shown.seen[row], strict=True):
                self._cell(line, _share(weight, most), _percent(weight) if seen else None)
            yield self._padded(self._with_statistics(line, row))
        line = self._label("received")
        for part in received:
            self._cell(line, _share(part, gained), _percent(part))
        yield from (self._padded(_line()), self._padded(line), self._padded(_line()))
        yield from self._legend(most, gained)

    def _heading(self) -> Iterator[Text]:
        names = list(self.map.keys)
        if self.at.pooled:
            names = [str(start + 1) for start, _ in runs(len(names), self.at.columns)]
        elif self._numbered():
            names = [str(place + 1) for place in range(len(names))]
        *above, last = stack(names, self.at.cell, TALLEST, ":" if self.plain else "⋮") or [""]
        blank = " " * (self.at.label + 1)
        for text in above:
            yield self._padded(_line(blank + text))
        last += "  entropy" if self.at.entropy else ""
        last += "  " + fit("strongest", self.at.strongest + SHARE) if self.at.strongest else ""
        yield self._padded(_line(blank + last))

    def _row_names(self) -> list[str]:
        names, shift = self.map.queries, self.map.shift
        if self.at.pooled:
            cells = runs(len(names), self.at.rows)
            spans = [span(shift + a, shift + b) for a, b in cells]
            room = max(map(len, spans))
            return [
                f"{place:<{room}} {' '.join(names[a : min(a + self.at.label, b)])}"
                for place, (a, b) in zip(spans, cells, strict=True)
            ]
        if self._numbered():
            return [f"{shift + place + 1} {name}" for place, name in enumerate(names)]
        return list(names)

    def _numbered(self) -> bool:
        """A column one cell wide cannot carry a wide character: number the tokens instead."""
        return self.at.cell == 1 and any(cell_len(sign) > 1 for sign in "".join(self.map.keys))

    def _label(self, name: str) -> Text:
        return _line(self._fit(name, self.at.label) + " ")

    def _cell(self, line: Text, share: float, number: str | None) -> None:
        """One cell: its number where it fits, and a colour or a mark; nothing where masked."""
        cell = self.at.cell
        if number is None:
            line.append(" " * cell)
        elif math.isnan(share):
            line.append("?".rjust(cell))
        elif self.plain:
            line.append(number.rjust(cell) if cell > 2 else glyph(share) * cell)
        else:
            line.append(number.rjust(cell) if cell > 2 else " " * cell, ground(share))

    def _with_statistics(self, line: Text, row: int) -> Text:
        if self.at.entropy:
            line.append(f"{self.shown.entropy[row]:{ENTROPY}.2f}")
        if self.at.strongest:
            line.append("  " + self._strongest(row))
        return line

    def _strongest(self, row: int) -> str:
        key, weight = self.shown.strongest[row]
        visible = sum(self.shown.seen[row])
        if key < 0:
            return self._fit("sees nothing", self.at.strongest + SHARE)
        # Among keys that all weigh the same, rounding decides which comes first.
        alike = visible > 1 and weight * visible < 1.01
        name = "all alike" if alike else self.map.keys[key]
        share = f" {weight:.0%}"
        return self._fit(name, self.at.strongest + SHARE - len(share)) + share

    def _legend(self, most: float, gained: float) -> Iterator[Text]:
        if not self.plain or self.at.cell < 3:
            yield self._scale(most)
        yield self._aside(self._reading())
        alike = max((sum(row) for row in self.shown.seen), default=0)
        says = []
        if self.at.entropy and self.at.pooled:
            says.append("entropy: mean of the rows, in nats")
        elif self.at.entropy:
            says.append(f"entropy in nats (all alike: {math.log(max(alike, 1)):.2f})")
        says.append(f"received: share of all weight (most: {gained:.0%})")
        yield self._aside("; ".join(says))

    def _aside(self, text: str) -> Text:
        return Text(text, "" if self.plain else "dim")

    def _scale(self, most: float) -> Text:
        steps = len(GLYPHS) if self.plain else 20
        scale = Text("weight 0 ")
        for step in range(steps):
            share = (step + 0.5) / steps
            if self.plain:
                scale.append(glyph(share))
            else:
                scale.append(" ", ground(share))
        return scale.append(f" {most:.0%}")

    def _reading(self) -> str:
        says = "rows look at columns; "
        if self.at.pooled:
            tall = math.ceil(len(self.map.queries) / self.at.rows)
            wide = math.ceil(len(self.map.keys) / self.at.columns)
            times = "x" if self.plain else "×"
            says += f"a cell is the largest of up to {tall} {times} {wide} weights"
            return says + (", mean of the heads" if self.map.heads > 1 else "")
        if self.at.cell > 2:
            says += "percent (. below 0.5); "
        return says + "blank: masked"

    def _fit(self, text: str, width: int) -> str:
        return fit(text, width, "~" if self.plain else "…")

    def _padded(self, line: Text) -> Text:
        return line.append(" " * (self.at.width - line.cell_len))


def span(start: int, stop: int) -> str:
    """Places [start, stop), counted from 1.

    >>> span(0, 4), span(4, 5)
    ('1-4', '5')
    """
    return str(stop) if stop == start + 1 else f"{start + 1}-{stop}"


def _line(text: str = "") -> Text:
    return Text(text, no_wrap=True, overflow="crop")


def _most(numbers: Iterator[float] | Sequence[float]) -> float:
    return max((n for n in numbers if not math.isnan(n)), default=0.0)


def _share(number: float, most: float) -> float:
    return number / most if most else 0.0


def _percent(weight: float) -> str:
    """A weight in three cells, so that neighbours never run into each other's digits."""
    if math.isnan(weight):
        return "?"
    return "." if weight < FAINT else f"{100 * weight:.0f}"
