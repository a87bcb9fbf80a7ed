"""A sentence with arcs over it: which token attends to which."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Before matplotlib itself: where that is missing, this says what to do.
from regard.view.pictures.theme import SIZE, Sheet, sheet  # isort: skip
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, PathPatch
from matplotlib.path import Path as Outline

from regard.errors import RegardError
from regard.seen import Seen
from regard.traces import Trace
from regard.view.atlas import (
    CAP,
    Choice,
    Head,
    Weights,
    allowed,
    choose,
    given,
    got,
    worth_showing,
)
from regard.view.pictures.caption import captioned

WIDEST = 9.0
"""Inches of a sentence before its words are turned upright."""
SPACE, LINE = 0.09, 0.19
HIGHEST = 1.6
THICKEST, LARGEST = 4.0, 0.065
"""Points of an arc, and the radius of a disc in inches, that stand for a weight of 1."""


@dataclass(frozen=True)
class Arc:
    """One weight between two places of the sentence that is shown."""

    query: int
    key: int
    weight: float
    above: bool
    """Whether it is drawn above the sentence."""


def arcs(
    what: Trace | Seen | Weights,
    tokens: Sequence[str] | None = None,
    token: int | None = None,
    *,
    layer: int | str = 0,
    head: Head = 0,
    batch: int = 0,
    call: int | None = None,
    threshold: float = 0.05,
    title: str | None = None,
    dark: bool = False,
) -> Figure:
    """A sentence with an arc for every weight above a threshold, the thicker the larger.

    With a token, its own arcs: above, what it looks at; below, what looks at it, each with its
    weight in percent. Without one, all of them: those that look back above, those that look ahead
    below; a disc is what a token gives itself. Of a text longer than 60 tokens, what matters to
    the token is shown.

    >>> import regard, torch
    >>> x = torch.eye(3) * 2
    >>> t = regard.trace(x, x, x, mask=regard.masks.causal())
    >>> figure = arcs(t, ["to", "be", "or"], token=2)
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['to', 'be', 'or', '8', '8', '83', '83', 'head 0', 'looks at, in percent',
     'is looked at by, in percent']
    """
    chosen = choose(what, tokens, layer=layer, head=head, batch=batch, call=call)
    if not 0 <= threshold <= 1:
        raise RegardError("threshold is a weight", got=f"{threshold:g}", accepted="0 to 1")
    if len(chosen.queries) + chosen.shift != len(chosen.keys):
        raise RegardError(
            "arcs stand over one text that looks at itself",
            got=f"{len(chosen.queries)} queries that are no keys",
            do="draw a heat map",
        )
    places, found = _all(chosen, threshold) if token is None else _of(chosen, token, threshold)
    names: list[str] = []
    for before, place in zip([-1, *places], places, strict=False):
        names += ["…"] * (place > before + 1) + [chosen.keys[place]]
    if places[-1] + 1 < len(chosen.keys):
        names.append("…")
    slots = _slots(places)
    name = captioned(what, chosen.name) if title is None else title
    with sheet(1, 1, [*names, name], dark=dark, layout="none") as page:
        _Drawing(page, names, [Arc(slots[a.query], slots[a.key], a.weight, a.above) for a in found],
                 None if token is None else slots[token % len(chosen.keys)]).draw(name)  # fmt: skip
    return page.figure


def _of(chosen: Choice, token: int, threshold: float) -> tuple[list[int], list[Arc]]:
    """The arcs of one token, and the places that are shown."""
    n, shift = len(chosen.keys), chosen.shift
    if not -n <= token < n:
        raise RegardError("there is no such token", got=str(token), accepted=f"0 to {n - 1}")
    token %= n
    looks = given(chosen.trace, token - shift) if token >= shift else [None] * n
    looked = [None] * shift + got(chosen.trace, token)
    found = [Arc(token, k, w, True) for k, w in enumerate(looks) if w is not None]
    found += [Arc(q, token, w, False) for q, w in enumerate(looked) if w is not None]
    found = [arc for arc in found if arc.weight >= threshold]
    if n <= CAP:
        return list(range(n)), found
    # What lies below the threshold is not worth showing.
    strong = [[w if w is not None and w >= threshold else None for w in side]
              for side in (looks, looked)]  # fmt: skip
    places = sorted({p for side in strong for p in worth_showing(side, [token])})
    return places, [arc for arc in found if arc.query in places and arc.key in places]


def _all(chosen: Choice, threshold: float) -> tuple[list[int], list[Arc]]:
    Q, n = len(chosen.queries), len(chosen.keys)
    if n > CAP:
        raise RegardError(
            "too many arcs to draw",
            got=f"{n} tokens",
            accepted=f"{CAP} tokens, or the arcs of one",
            do="choose a token, or draw a heat map",
        )
    weights = chosen.trace.weights().reshape(-1, Q, n).mean(0).tolist()
    seen = allowed(chosen.trace, range(Q)).tolist()
    found = [
        Arc(q + chosen.shift, k, weights[q][k], k <= q + chosen.shift)
        for q in range(Q)
        for k in range(n)
        if seen[q][k] and weights[q][k] >= threshold
    ]
    return list(range(n)), found


def _slots(places: Sequence[int]) -> dict[int, int]:
    """Where each place stands among the words that are shown, gaps taking one each."""
    slots: dict[int, int] = {}
    at, before = 0, -1
    for place in places:
        at += place > before + 1
        slots[place] = at
        at, before = at + 1, place
    return slots


@dataclass(frozen=True)
class _Drawing:
    sheet: Sheet
    names: list[str]
    arcs: list[Arc]
    token: int | None

    def draw(self, title: str) -> None:
        """Words on a line, measured, and arcs between their middles; axes count inches."""
        figure = self.sheet.figure
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        words = self.sheet.words(fontsize=SIZE + 1, va="center", ha="center")
        texts = [axes.text(0, 0, self.sheet.label(name), **words) for name in self.names]
        renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
        boxes = [text.get_window_extent(renderer) for text in texts]
        wide = [box.width / figure.dpi for box in boxes]
        upright = sum(wide) + 2 * SPACE * len(wide) > WIDEST
        tall = max(wide) if upright else LINE
        steps = [LINE if upright else w + 2 * SPACE for w in wide]
        middles = [sum(steps[:i]) + step / 2 for i, step in enumerate(steps)]
        hanging = upright and all(arc.above for arc in self.arcs)
        for i, (text, x) in enumerate(zip(texts, middles, strict=True)):
            text.set_position((x, tall / 2 if hanging else 0))
            text.set_verticalalignment("top" if hanging else "center")
            text.set_rotation(90 if upright else 0)
            if i == self.token:
                text.set_fontweight("bold")
        # Between the words and the arcs stand the weights of one token, or the discs of all.
        edge = tall / 2 + (LARGEST if self.token is None else 0.16)
        heights = [self._arc(axes, arc, middles, edge) for arc in self.arcs]
        above, below = (
            max((h for h, a in zip(heights, self.arcs, strict=True) if a.above == up), default=edge)
            for up in (True, False)
        )
        sides = list(self._sides(above + 0.2, -below - 0.2))
        left, right = -0.1, sum(steps) + 0.1
        low = -below - (0.34 if any(y < 0 for _, y in sides) else 0.05)
        high = above + (0.34 if title or any(y > 0 for _, y in sides) else 0.05)
        axes.set_xlim(left, right)
        axes.set_ylim(low, high)
        figure.set_size_inches(right - left, high - low)
        words = self.sheet.words(fontsize=SIZE + 1, va="center")
        axes.text(0, above + 0.2, self.sheet.write(title), **words)
        for says, y in sides:
            colour = self.sheet.ink.back if y > 0 else self.sheet.ink.ahead
            words = self.sheet.words(color=colour, va="center", ha="right")
            axes.text(right - 0.1, y, says, **words)

    def _sides(self, above: float, below: float) -> Iterator[tuple[str, float]]:
        """What arcs on either side mean, and where that is said."""
        both = {arc.above for arc in self.arcs}
        if self.token is not None and True in both:
            yield "looks at, in percent", above
        if False in both:
            yield "ahead" if self.token is None else "is looked at by, in percent", below

    def _arc(self, axes: Axes, arc: Arc, middles: list[float], edge: float) -> float:
        """One arc, and how far it reaches from the line of words."""
        colour = self.sheet.ink.back if arc.above else self.sheet.ink.ahead
        side = 1 if arc.above else -1
        a, b = middles[arc.query], middles[arc.key]
        height = edge
        if arc.query != arc.key:
            height += min(HIGHEST, 0.08 + 0.32 * abs(a - b))
            control = edge + (height - edge) * 4 / 3
            points = [(a, side * edge), (a, side * control), (b, side * control), (b, side * edge)]
            line = Outline(points, [Outline.MOVETO, *[Outline.CURVE4] * 3])
            width = max(0.4, THICKEST * arc.weight)
            strength = 0.35 + 0.65 * arc.weight
            axes.add_patch(PathPatch(line, fill=False, lw=width, ec=colour, alpha=strength))
        elif self.token is None:
            size = LARGEST * math.sqrt(arc.weight)
            axes.add_patch(Circle((a, side * edge), size, color=colour, lw=0))
            height += size
        if self.token is not None:
            words = self.sheet.words(fontsize=SIZE - 1.5, color=colour, va="center", ha="center")
            other = b if arc.above else a
            axes.text(other, side * (edge - 0.08), f"{100 * arc.weight:.0f}", **words)
        return height
