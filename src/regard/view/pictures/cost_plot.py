"""What a model costs, drawn against the length of what it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Before matplotlib itself: where that is missing, this says what to do.
from regard.view.pictures.theme import SIZE, Sheet, save, sheet  # isort: skip
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from regard.cost import Configuration, Cost, model
from regard.cost.devices import device as find_device
from regard.cost.rates import Device
from regard.cost.units import counted, sized, timed, tokens
from regard.errors import RegardError
from regard.view.pictures.line_ends import COLOURS, End, name_ends

__all__ = ["cost_plot", "save"]

SHORTEST, LONGEST = 512, 1 << 20


@dataclass(frozen=True)
class Line:
    label: str
    values: list[float]
    colour: str
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    title: str
    lines: list[Line]
    shown: Callable[[float], str]
    base: int = 10


def cost_plot(
    of: Sequence[Configuration],
    context: int | str,
    *,
    batch: int = 1,
    device: str | Device = "H100 SXM",
    dark: bool = False,
) -> Figure:
    """Work, memory, and times at best against the context: one model's parts, or several models.

    >>> from regard.cost import preset
    >>> figure = cost_plot([preset("gpt2")], 1024)
    >>> [axes.get_title(loc="left") for axes in figure.axes][:2]
    ['FLOPs for each token read', 'Memory']
    """
    if not 1 <= len(of) <= len(COLOURS):
        raise RegardError(
            "a plot shows a few models", got=f"{len(of)}", accepted=f"1 to {len(COLOURS)}"
        )
    on, marked = find_device(device), tokens(context)
    lengths = _lengths(marked)
    costs = [[model(c, n, batch=batch, device=on) for n in lengths] for c in of]
    panels = _of_one(costs[0], on) if len(of) == 1 else _of_many(costs, on)
    what = f": {of[0].name}" if len(of) == 1 else ""
    kinds = {c.dtype for c in of}
    kind = kinds.pop() if len(kinds) == 1 else "each model in its own dtype"
    with sheet(7.2, 5.4, [*(c.name for c in of), on.name], dark=dark) as page:
        grid = page.figure.subplots(2, 2, sharex=True).flat
        for panel, axes in zip(panels, grid, strict=True):
            _draw(page, axes, panel, lengths, marked)
        many = "" if batch == 1 else f", {batch} texts at once"
        page.figure.suptitle(
            page.write(f"What reading and writing cost{what} ({kind}{many})"),
            x=0.01, ha="left", **page.words(fontsize=SIZE + 2, fontweight="bold"),
        )  # fmt: skip
        for axes in page.figure.axes[2:]:
            axes.set_xlabel("context, tokens", **page.words(color=page.ink.faint))
    return page.figure


def _lengths(marked: int) -> list[int]:
    powers = [1 << i for i in range(SHORTEST.bit_length() - 1, LONGEST.bit_length())]
    return sorted({*powers, marked})


def _of_one(costs: list[Cost], on: Device) -> list[Panel]:
    work = [
        Line("pairs of tokens", [_each(c, pairs=True) for c in costs], COLOURS[1]),
        Line("matrices", [_each(c, pairs=False) for c in costs], COLOURS[0]),
    ]
    caches = [0 if c.cache is None else c.cache.in_context for c in costs]
    memory = [
        Line("eager, a layer", [c.eager.peak for c in costs], COLOURS[1]),
        Line("fused, a layer", [c.fused.peak for c in costs], COLOURS[2]),
        Line("cache", [float(n) for n in caches], COLOURS[3]),
        Line("weights", [c.weights for c in costs], COLOURS[0]),
    ]
    if on.memory is not None:
        memory.append(Line(on.name, [on.memory for _ in costs], COLOURS[-1], ":"))
    times = [
        Line("eager", [c.time(how="eager").seconds for c in costs], COLOURS[1]),
        Line("fused", [c.time().seconds for c in costs], COLOURS[2]),
    ]
    written = [Line("", [c.tokens_per_second() for c in costs], COLOURS[0])]
    return _panels(work, "Memory", memory, times, written, on)


def _of_many(costs: list[list[Cost]], on: Device) -> list[Panel]:
    def lines(value: Callable[[Cost], float]) -> list[Line]:
        return [
            Line(some[0].name, [value(c) for c in some], colour)
            for some, colour in zip(costs, COLOURS, strict=False)
        ]

    return _panels(
        lines(lambda c: c.flops() / c.tokens),
        "Cache of keys and values",
        lines(lambda c: 0 if c.cache is None else c.cache.in_context),
        lines(lambda c: c.time().seconds),
        lines(lambda c: c.tokens_per_second()),
        on,
    )


def _panels(
    work: list[Line],
    held: str,
    memory: list[Line],
    times: list[Line],
    written: list[Line],
    on: Device,
) -> list[Panel]:
    return [
        Panel("FLOPs for each token read", work, counted),
        Panel(held, memory, sized, base=2),
        Panel(f"Reading the context, at best on {on.name}", times, timed),
        Panel(f"Writing, tokens a second at best on {on.name}", written, counted),
    ]


def _each(cost: Cost, *, pairs: bool) -> float:
    return sum(p.flops() for p in cost.parts if p.pairwise == pairs) / cost.tokens


def _draw(page: Sheet, axes: Axes, panel: Panel, lengths: list[int], marked: int) -> None:
    axes.set_facecolor("none")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=panel.base)
    axes.set_xlim(lengths[0], lengths[-1])
    axes.axvline(marked, color=page.ink.faint, linewidth=0.6, linestyle=(0, (2, 2)), zorder=0)
    for line in panel.lines:
        axes.plot(lengths, line.values, line.style, color=line.colour, linewidth=1.5,
                  solid_capstyle="round")  # fmt: skip
    page.title(axes, panel.title)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(page.ink.faint)
    _ticks(page, axes, panel)
    ends = [End(line.label, line.values[-1], line.colour) for line in panel.lines if line.label]
    name_ends(page, axes, ends)
    _at_the_mark(page, axes, panel, lengths.index(marked), marked)


def _ticks(page: Sheet, axes: Axes, panel: Panel) -> None:
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: _length(n)))
    low, high = axes.get_ylim()
    if panel.base == 2:
        step = 8 if high / low < 2**16 else 32
        axes.yaxis.set_major_locator(LogLocator(base=step, numticks=10))
    else:
        parts = (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=parts, numticks=10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _bare(panel.shown(y))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=page.ink.faint, alpha=0.25, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(length=2, width=0.6, colors=page.ink.text, labelsize=SIZE - 1)
    axes.tick_params(color=page.ink.faint)


def _at_the_mark(page: Sheet, axes: Axes, panel: Panel, at: int, marked: int) -> None:
    """A dot, and the number, where each line crosses the context that was asked for."""
    for line in panel.lines:
        if line.style == "-":
            axes.plot(marked, line.values[at], "o", color=line.colour, markersize=3)
    if len(panel.lines) == 1:
        axes.annotate(
            f"{panel.shown(panel.lines[0].values[at])} at {_length(marked)}",
            (marked, panel.lines[0].values[at]), xytext=(5, 5), textcoords="offset points",
            **page.words(fontsize=SIZE - 1),
        )  # fmt: skip


def _length(n: float) -> str:
    """A context as people name it.

    >>> _length(512), _length(131072), _length(2**20), _length(100_000)
    ('512', '128k', '1M', '100,000')
    """
    whole = round(n)
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if whole >= size and whole % size == 0:
            return f"{whole // size}{unit}"
    return f"{whole:,}"


def _bare(text: str) -> str:
    """A round number without the zeros behind its point."""
    number, _, unit = text.partition(" ")
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return f"{number} {unit}".rstrip()
