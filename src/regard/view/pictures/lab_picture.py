"""What an experiment found, drawn: every panel of it, or one."""

from __future__ import annotations

import math
from itertools import cycle

# Before matplotlib itself: where that is missing, this says what to do.
from regard.view.pictures.theme import SIZE, Theme, Sheet, save, sheet  # isort: skip
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)

from regard.lab.apparatus.experiments import Result
from regard.lab.apparatus.panels import Bars, Graph, HeatMap, Lines, Panel, Points
from regard.view.pictures.line_ends import COLOURS, ON_DARK, End, name_ends

__all__ = ["lab_picture", "panel_picture", "save"]

ACROSS = 3
"""Panels in a row."""
WIDTH, HEIGHT = 3.5, 2.5
"""Inches of a panel."""
APART = 0.09
NUMBERED = 10
"""The most bars that have room for their numbers."""
NAMED = 110
"""Points in which the names of a map's rows stand, and of its columns."""
LETTERS = 34
"""The most that the names of groups of bars may have together to stand side by side."""


def lab_picture(result: Result, *, dark: bool = False) -> Figure:
    """All panels of a result on one sheet, with its title over them.

    >>> from regard.lab import scaling
    >>> figure = lab_picture(scaling.run(widths=(16, 64, 256), samples=32, steps=0))
    >>> [axes.get_title(loc="left") for axes in figure.axes][:2]
    ['Variance of q·k', 'Entropy of softmax over 64 keys']
    """
    across = min(ACROSS, len(result.panels))
    down = math.ceil(len(result.panels) / across)
    colours = _colours(result, dark)
    with sheet(
        WIDTH * across, HEIGHT * down + 0.4, _texts(result.panels, result.about.title), dark=dark
    ) as page:
        page.figure.suptitle(
            page.write(result.about.title), x=0.01, ha="left",
            **page.words(fontsize=SIZE + 3, fontweight="bold"),
        )  # fmt: skip
        page.figure.supxlabel(
            _seeds(result), x=0.99, ha="right", **page.words(color=page.ink.faint)
        )
        page.figure.get_layout_engine().set(wspace=0.06, hspace=0.08)  # type: ignore[union-attr, call-arg]
        places = list(page.figure.subplots(down, across, squeeze=False).flat)
        for axes in places[len(result.panels) :]:
            axes.set_visible(False)
        for panel, axes in zip(result.panels, places, strict=False):
            _draw(page, axes, panel, colours)
    return page.figure


def _seeds(result: Result) -> str:
    """Of which seeds a picture is, where there were several."""
    first, seeds = result.settings.get("seed", 0), result.settings.get("seeds", 1)
    ran = seeds if isinstance(seeds, list) else range(first, first + seeds)
    if len(ran) < 2:
        return ""
    if any(isinstance(panel, Lines | Bars) and panel.has_ranges for panel in result.panels):
        return f"Of seed {ran[0]}; bands, and lines over bars, of seeds {ran[0]} to {ran[-1]}."
    return f"Of seed {ran[0]}, the first of {len(ran)}."


def panel_picture(result: Result, panel: Panel, *, dark: bool = False) -> Figure:
    """One panel alone, in the colours that it has among the others."""
    with sheet(WIDTH + 0.5, HEIGHT + 0.3, _texts([panel], ""), dark=dark) as page:
        _draw(page, page.figure.subplots(), panel, _colours(result, dark))
    return page.figure


def _colours(result: Result, dark: bool) -> dict[str, str]:
    """A colour for each label, the same wherever it stands."""
    labels: dict[str, None] = {}
    for panel in result.panels:
        if isinstance(panel, Lines):
            labels |= {line.label: None for line in panel.lines if not line.dashed}
        if isinstance(panel, Bars):
            labels |= dict.fromkeys(panel.series)
        if isinstance(panel, Points | Graph):
            labels |= {point.group: None for point in panel.points}
    return dict(zip(labels, cycle(ON_DARK if dark else COLOURS), strict=False))


def _texts(panels: object, title: str) -> list[str]:
    """Everything that is written, so that fonts can be found for it."""
    return [title, repr(panels)]


def _draw(page: Sheet, axes: Axes, panel: Panel, colours: dict[str, str]) -> None:
    axes.set_facecolor("none")
    axes.tick_params(length=2, width=0.6, labelcolor=page.ink.text, labelsize=SIZE - 1)
    axes.tick_params(color=page.ink.faint)
    page.title(axes, panel.title)
    if isinstance(panel, HeatMap):
        _draw_heat(page, axes, panel)
        return
    if isinstance(panel, Graph):
        _draw_graph(page, axes, panel, colours)
        return
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(page.ink.faint)
    axes.grid(axis="y", color=page.ink.faint, alpha=0.25, linewidth=0.5)
    axes.set_axisbelow(True)
    if isinstance(panel, Lines):
        _draw_lines(page, axes, panel, colours)
    if isinstance(panel, Bars):
        _draw_bars(page, axes, panel, colours)
    if isinstance(panel, Points):
        _draw_points(page, axes, panel, colours)


def _draw_lines(page: Sheet, axes: Axes, panel: Lines, colours: dict[str, str]) -> None:
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    elif all(float(x).is_integer() for line in panel.lines for x in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda y, _: _power(y))
    for line in panel.lines:
        colour = page.ink.faint if line.dashed else colours[line.label]
        axes.plot(line.x, line.y, "--" if line.dashed else "-", color=colour,
                  linewidth=1.0 if line.dashed else 1.5, zorder=1 if line.dashed else 2,
                  marker="o" if len(line.x) < 12 and not line.dashed else "",
                  markersize=3)  # fmt: skip
        if line.ranges:
            low, high = zip(*line.ranges, strict=True)
            axes.fill_between(line.x, low, high, color=colour, alpha=0.18, linewidth=0)
    if panel.log_x:
        _tick_doublings(axes.xaxis, *axes.get_xlim())
    if panel.log_y:
        _tick_decades(axes.yaxis, *axes.get_ylim())
    if panel.percent:
        _as_percent(axes)
    axes.set_xlabel(panel.x, **page.words(color=page.ink.faint))
    axes.set_ylabel(panel.y, **page.words(color=page.ink.faint))
    ends = [
        End(line.label, line.y[-1], page.ink.faint if line.dashed else colours[line.label],
            line.x[-1])
        for line in panel.lines
    ]  # fmt: skip
    name_ends(page, axes, ends, APART)


def _draw_bars(page: Sheet, axes: Axes, panel: Bars, colours: dict[str, str]) -> None:
    wide = 0.8 / len(panel.series)
    for i, (label, values) in enumerate(panel.series.items()):
        at = [group - 0.4 + (i + 0.5) * wide for group in range(len(panel.groups))]
        axes.bar(at, values, wide * 0.92, color=colours[label], label=page.write(label))
        ranges = panel.ranges.get(label, [])
        for x, (low, high) in zip(at, ranges, strict=False):
            axes.plot((x, x), (low, high), color=page.ink.text, linewidth=1.0)
        tops = [high for _, high in ranges] or values
        for x, value, top in zip(at, values, tops, strict=True):
            if len(panel.series) * len(panel.groups) > NUMBERED:
                break
            text = f"{value:.0%}" if panel.percent else f"{value:.3g}"
            axes.annotate(text, (x, max(value, top)), xytext=(0, 2), textcoords="offset points",
                          ha="center", **page.words(fontsize=SIZE - 2))  # fmt: skip
    axes.set_xticks(range(len(panel.groups)), [page.write(g) for g in panel.groups])
    if sum(map(len, panel.groups)) > LETTERS:
        axes.tick_params(axis="x", labelrotation=25 if len(panel.groups) < 9 else 60)
        for tick in axes.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(panel.y, **page.words(color=page.ink.faint))
    if panel.percent:
        _as_percent(axes)
    if len(panel.series) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, handlelength=0.8,
                    fontsize=SIZE - 1, labelcolor=page.ink.text)  # fmt: skip


def _draw_heat(page: Sheet, axes: Axes, panel: HeatMap) -> None:
    rows, columns = len(panel.rows), len(panel.columns)
    most = max(abs(value) for row in panel.values for value in row)
    drawn = axes.imshow(
        panel.values, aspect="auto", interpolation="nearest",
        cmap=_signed(page.ink) if panel.signed else page.ink.weights,
        vmin=-most if panel.signed else 0, vmax=most,
    )  # fmt: skip
    page.bare(axes)
    axes.set_xticks(range(columns), [page.label(name) for name in panel.columns], rotation=45,
                    ha="right", rotation_mode="anchor")  # fmt: skip
    axes.set_yticks(range(rows), [page.label(name) for name in panel.rows])
    for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
        axis.set_tick_params(labelsize=min(SIZE - 1, NAMED / names))
    axes.set_xlabel(panel.x, **page.words(color=page.ink.faint))
    axes.set_ylabel(panel.y, **page.words(color=page.ink.faint))
    page.scale(drawn, axes, panel.scale, cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)))


def _signed(ink: Theme) -> Colormap:
    """From the colour of what is below 0, over that of the page, to that of what is above."""
    return LinearSegmentedColormap.from_list("signed", [ink.ahead, ink.page, ink.back])


def _tick_doublings(axis: Axis, low: float, high: float) -> None:
    """A number at every fourfold, or at every doubling where these are few; a tick at each."""
    few = math.log2(high / low) < 5
    axis.set_major_locator(LogLocator(base=2 if few else 4, numticks=12))
    axis.set_minor_locator(LogLocator(base=2, numticks=24))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=1.5, width=0.4)


def _tick_decades(axis: Axis, low: float, high: float) -> None:
    """A number at every power of ten, or also at 2 and 5 where these are few; ticks between."""
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if decades < 1.5 else (1,),
                                      numticks=8))  # fmt: skip
    axis.set_minor_locator(
        LogLocator(base=10, subs=range(2, 10), numticks=12) if decades < 6 else NullLocator()
    )
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=1.5, width=0.4)


def _power(y: float) -> str:
    """A number of a logarithmic axis as it is read most easily.

    >>> _power(0.01), _power(1e-08), _power(1e6), _power(5.0)
    ('0.01', '$10^{-8}$', '$10^{6}$', '5')
    """
    exponent = round(math.log10(y))
    if -4 < exponent < 5:
        return f"{y:g}"
    return f"$10^{{{exponent}}}$" if math.isclose(y, 10.0**exponent) else f"{y:.0e}"


def _draw_points(page: Sheet, axes: Axes, panel: Points, colours: dict[str, str]) -> None:
    for point in panel.points:
        colour, (x, y) = colours[point.group], point.at
        if point.start is not None:
            axes.annotate("", (x, y), (point.start[0], point.start[1]), arrowprops={
                "arrowstyle": "->", "color": page.ink.faint, "linewidth": 0.8, "shrinkA": 3,
                "shrinkB": 3})  # fmt: skip
        axes.plot(x, y, "o", color=colour, markersize=4)
        # On the side that its arrow does not come from.
        above = point.start is None or y > point.start[1]
        axes.annotate(page.label(point.label), (x, y), xytext=(0, 4 if above else -4),
                      textcoords="offset points", ha="center", va="bottom" if above else "top",
                      **page.words(color=colour, fontsize=SIZE - 1))  # fmt: skip
    axes.margins(x=0.32, y=0.22)
    axes.set_xlabel(panel.x, **page.words(color=page.ink.faint))
    axes.set_ylabel(panel.y, **page.words(color=page.ink.faint))


def _draw_graph(page: Sheet, axes: Axes, panel: Graph, colours: dict[str, str]) -> None:
    page.bare(axes)
    axes.set_xticks([])
    axes.set_yticks([])
    most = max(panel.edges.values())
    for (a, b), weight in panel.edges.items():
        (x0, y0), (x1, y1) = panel.points[a].at, panel.points[b].at
        share = weight / most
        axes.plot((x0, x1), (y0, y1), color=page.ink.text, linewidth=0.4 + 2.6 * share,
                  alpha=0.15 + 0.6 * share, zorder=1, solid_capstyle="round")  # fmt: skip
    for group in dict.fromkeys(point.group for point in panel.points):
        places = [point.at for point in panel.points if point.group == group]
        across, up = [x for x, _ in places], [y for _, y in places]
        axes.scatter(across, up, s=26, color=colours[group], zorder=2, label=page.write(group))
    for point in panel.points:
        axes.annotate(page.label(point.label), (point.at[0], point.at[1]), xytext=(0, 5),
                      textcoords="offset points", ha="center", va="bottom",
                      **page.words(fontsize=SIZE - 1, fontweight="bold"))  # fmt: skip
    axes.margins(x=0.08, y=0.14)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, handlelength=0.8,
                fontsize=SIZE - 1, labelcolor=page.ink.text)  # fmt: skip


def _as_percent(axes: Axes) -> None:
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
