"""A head as a heat map, all heads as a grid, and the entropy of each layer, as pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Before matplotlib itself: where that is missing, this says what to do.
from regard.view.pictures.theme import LONGEST, SIZE, Sheet, sheet  # isort: skip
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator
from rich.cells import cell_len

from regard.errors import RegardError
from regard.seen import Seen
from regard.traces import Trace
from regard.view.atlas import (
    CAP,
    Choice,
    Head,
    HeadFigures,
    Statistic,
    Weights,
    allowed,
    choose,
    head_figures,
)
from regard.view.pictures.caption import captioned

CELLS = 256
FAINTEST = 1e-3
MEANING = {
    "entropy": "entropy",
    "sink": "on the first token",
    "distance": "distance in tokens",
    "logit": "largest logit",
}


def heat_map(
    what: Trace | Seen | Weights,
    tokens: Sequence[str] | None = None,
    *,
    layer: int | str = 0,
    head: Head = 0,
    batch: int = 0,
    call: int | None = None,
    queries: Sequence[str] | None = None,
    cells: int = CELLS,
    title: str | None = None,
    dark: bool = False,
) -> Figure:
    """The weights of one head, or the mean of all heads: rows look at columns.

    Masked pairs are left blank. A text longer than 60 tokens is pooled into cells,
    each the largest weight in it, on a logarithmic scale: long rows share little with each key.

    >>> import regard, torch
    >>> x = torch.eye(3) * 2
    >>> t = regard.trace(x, x, x, mask=regard.masks.causal())
    >>> figure = heat_map(t, ["to", "be", "or"])
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['to', 'be', 'or']
    """
    chosen = choose(what, tokens, layer=layer, head=head, batch=batch, call=call, queries=queries)
    if cells < 1:
        raise RegardError("cells counts cells", got=str(cells), accepted="1 or more")
    name = captioned(what, chosen.name) if title is None else title
    if max(len(chosen.keys), len(chosen.queries)) > CAP:
        return _pooled(chosen, cells, name, dark)
    return _exact(chosen, name, dark)


def head_grid(
    what: Seen | Trace | Weights | HeadFigures, *, title: str | None = None, dark: bool = False
) -> Figure:
    """Every head of a model: layers × heads, coloured by how spread it looks, what falls on the
    first token, and how far it looks; by its largest logit instead, where only statistics were
    kept.

    >>> import regard, torch
    >>> x = torch.zeros(1, 2, 4, 8)
    >>> figure = head_grid(regard.trace(x, x, x))
    >>> [axes.get_title("left") for axes in figure.axes[:3]]
    ['entropy', 'on the first token', 'distance in tokens']
    """
    found = what if isinstance(what, HeadFigures) else head_figures(what)
    title = captioned(what) if title is None else title
    shown = [name for name in found.shown if found.knows(name)]
    layers, heads = len(found.paths), found.heads
    cell = min(0.22, max(0.08, 4.0 / max(layers, heads)))
    width = len(shown) * (max(1.1, heads * cell) + 0.55)
    height = max(0.5, layers * cell) + 1.0
    with sheet(width, height, [title or ""], dark=dark) as page:
        panels = page.figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, shown, strict=True):
            _panel(page, axes, found, name)
        panels[0].set_ylabel("layer", **page.words(color=page.ink.faint))
        if title:
            page.figure.suptitle(page.write(title), **page.words(fontsize=SIZE + 1))
    return page.figure


def entropy_by_layer(
    what: Seen | Weights | HeadFigures, *, title: str | None = None, dark: bool = False
) -> Figure:
    """How spread heads look, layer by layer: a dot for each head, a line through their means.

    >>> import regard, torch
    >>> x = torch.zeros(1, 2, 4, 8)
    >>> from regard.view.atlas import head_figures
    >>> figure = entropy_by_layer(head_figures(regard.trace(x, x, x)))
    >>> figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()
    ('layer', 'entropy / log of visible keys')
    """
    found = what if isinstance(what, HeadFigures) else head_figures(what)
    title = captioned(what) if title is None else title
    layers = range(len(found.paths))
    means = [sum(row) / len(row) for row in found.entropy]
    with sheet(max(3.2, min(7.0, 1.2 + 0.25 * len(layers))), 2.3, [title or ""], dark=dark) as page:
        axes = page.bare(page.figure.subplots())
        places = [layer for layer in layers for _ in found.entropy[layer]]
        values = [value for row in found.entropy for value in row]
        axes.scatter(places, values, s=12, color=page.ink.back, alpha=0.55, lw=0)
        axes.plot(layers, means, color=page.ink.text, lw=1.0)
        axes.set_xlim(-0.4, len(layers) - 0.6)
        axes.set_ylim(0, 1.02 if found.normalised else None)
        axes.spines["left"].set_visible(True)
        axes.spines["left"].set_color(page.ink.faint)
        axes.set_xticks(_ticks(len(layers)))
        axes.set_xlabel("layer", **page.words(color=page.ink.faint))
        unit = "log of visible keys" if found.normalised else "nats"
        says = f"entropy {'/' if found.normalised else 'in'} {unit}"
        axes.set_ylabel(says, **page.words(color=page.ink.faint))
        axes.annotate(
            "mean", (layers[-1], means[-1]), (5, 0), textcoords="offset points", va="center",
            **page.words(),
        )  # fmt: skip
        if title:
            page.title(axes, title)
    return page.figure


def _exact(chosen: Choice, title: str, dark: bool) -> Figure:
    """A cell for every weight, as shapes that stay sharp at any size."""
    Q, K = len(chosen.queries), len(chosen.keys)
    weights = chosen.trace.weights().reshape(-1, Q, K).mean(0)
    weights = weights.masked_fill(~allowed(chosen.trace, range(Q)).to(weights.device), math.nan)
    cell = min(0.24, max(0.12, 5.0 / max(Q, K)))
    size = min(SIZE, 72 * cell * 0.8)
    names = [*chosen.keys, *chosen.queries, title]
    room = min(LONGEST, max(map(cell_len, names[:-1]))) * 0.65 * size / 72
    with sheet(K * cell + room + 0.9, Q * cell + room + 0.5, names, dark=dark) as page:
        axes = page.bare(page.figure.subplots())
        norm = Normalize(0, _most(weights.tolist()))
        grid = axes.pcolormesh(weights.cpu().numpy(), cmap=page.ink.weights, norm=norm,
                               edgecolors=page.ink.page, linewidth=0.4)  # fmt: skip
        axes.set_aspect("equal")
        axes.invert_yaxis()
        _named(page, axes, chosen, size)
        page.scale(grid, axes, "weight", shrink=min(1.0, 1.4 / (Q * cell)), aspect=14, pad=0.02)
        page.title(axes, title)
    return page.figure


def _named(page: Sheet, axes: Axes, chosen: Choice, size: float) -> None:
    words = page.words(fontsize=size)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    for set_ticks, names, turn in (
        (axes.set_xticks, chosen.keys, 90),
        (axes.set_yticks, chosen.queries, 0),
    ):
        middles = [place + 0.5 for place in range(len(names))]
        set_ticks(middles, [page.label(name) for name in names], rotation=turn, **words)
    axes.set_ylabel("query", **page.words(color=page.ink.faint))
    axes.set_xlabel("key", **page.words(color=page.ink.faint))


def _pooled(chosen: Choice, cells: int, title: str, dark: bool) -> Figure:
    """A long text: cells that hold the largest of many weights."""
    Q, K = len(chosen.queries), len(chosen.keys)
    rows, columns = min(cells, Q), min(cells, K)
    pooled = chosen.trace.map((rows, columns), pool="max").reshape(-1, rows, columns).mean(0)
    pooled = pooled.masked_fill(pooled == 0, math.nan)
    most = _most(pooled.tolist())
    tall, wide = (max(1.0, 4.2 * n / max(Q, K)) for n in (Q, K))
    with sheet(wide + 1.2, tall + 0.7, [title], dark=dark) as page:
        axes = page.bare(page.figure.subplots())
        shift = chosen.shift
        norm = LogNorm(most * FAINTEST, most, clip=True)
        place = (1, K + 1, shift + Q + 1, shift + 1)
        image = axes.imshow(pooled.cpu().numpy(), cmap=page.ink.weights, norm=norm, extent=place,
                            interpolation="nearest", aspect="auto")  # fmt: skip
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.set_ylabel("query", **page.words(color=page.ink.faint))
        axes.set_xlabel("key", **page.words(color=page.ink.faint))
        many = f"{math.ceil(Q / rows)} × {math.ceil(K / columns)}"
        says = f"largest of {many} weights" if (rows, columns) != (Q, K) else "weight"
        marks = [
            most * FAINTEST,
            *(10.0**n for n in range(-9, 1) if FAINTEST < 10.0**n / most <= 1),
        ]
        bar = page.scale(image, axes, says, shrink=0.5, aspect=18, pad=0.02)
        bar.set_ticks(marks, labels=[f"{'' if i else '≤ '}{m:.1g}" for i, m in enumerate(marks)])
        page.title(axes, title)
    return page.figure


def _panel(page: Sheet, axes: Axes, found: HeadFigures, name: Statistic) -> None:
    """One statistic of every head."""
    grid = [[*row, *[math.nan] * (found.heads - len(row))] for row in found.of(name)]
    share = name == "sink" or (name == "entropy" and found.normalised)
    norm = Normalize(0, 1.0 if share else _most(grid))
    page.bare(axes)
    drawn = axes.pcolormesh(
        grid, cmap=page.ink.weights, norm=norm, edgecolors=page.ink.page, linewidth=0.4
    )  # fmt: skip
    axes.set_aspect("equal")
    axes.set_ylim(len(grid), 0)
    for set_ticks, n in ((axes.set_xticks, found.heads), (axes.set_yticks, len(grid))):
        set_ticks([tick + 0.5 for tick in _ticks(n)], [str(t) for t in _ticks(n)], **page.words())
    axes.set_xlabel("head", **page.words(color=page.ink.faint))
    axes.set_title(MEANING[name], loc="left", **page.words())
    bar = page.scale(drawn, axes, "", location="bottom", aspect=20, shrink=0.8, pad=0.03)
    bar.locator = FixedLocator([0.0, 0.5, 1.0]) if share else MaxNLocator(3)
    bar.update_ticks()


def _ticks(n: int, most: int = 12) -> list[int]:
    """Round numbers below n, at most so many.

    >>> _ticks(5), _ticks(48)
    ([0, 1, 2, 3, 4], [0, 5, 10, 15, 20, 25, 30, 35, 40, 45])
    """
    steps = (base * 10**power for power in range(9) for base in (1, 2, 5))
    return list(range(0, n, next(step for step in steps if n <= most * step)))


def _most(grid: Sequence[Sequence[float]]) -> float:
    """The largest number that is known, to scale colours by."""
    known = [value for row in grid for value in row if not math.isnan(value)]
    return max(known, default=0.0) or 1.0
