"""Pictures of several seeds: those of the first, with ranges over all where these can be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from regard.lab.apparatus.panels import Bars, Lines, Panel


def panels_over_seeds(panels: Sequence[tuple[Panel, ...]]) -> tuple[Panel, ...]:
    """The panels of each seed as one picture, whose captions say of which seeds they are.

    >>> one, two = (Bars("Right", "A few.", "share", ["all"], {"toy": [y]}) for y in (0.6, 0.8))
    >>> panels_over_seeds([(one,), (two,)])[0].ranges
    {'toy': [(0.6, 0.8)]}
    """
    if len(panels) == 1:
        return panels[0]
    if len({len(each) for each in panels}) > 1:
        return tuple(_of_the_first(panel) for panel in panels[0])
    return tuple(_merged(each) for each in zip(*panels, strict=True))


def _merged(panels: Sequence[Panel]) -> Panel:
    first = panels[0]
    lines = [panel for panel in panels if isinstance(panel, Lines)]
    if len(lines) == len(panels) and len({_points(panel) for panel in lines}) == 1:
        each = zip(*(panel.lines for panel in lines), strict=True)
        return replace(
            lines[0],
            caption=f"{first.caption} Lines are of the first seed, bands of {len(panels)} seeds.",
            lines=[replace(line[0], ranges=_ranges([one.y for one in line])) for line in each],
        )
    bars = [panel for panel in panels if isinstance(panel, Bars)]
    if len(bars) == len(panels) and len({_names(panel) for panel in bars}) == 1:
        return replace(
            bars[0],
            caption=f"{first.caption} Bars are of the first seed, lines over them of "
            f"{len(panels)} seeds.",
            ranges={name: _ranges([bar.series[name] for bar in bars]) for name in bars[0].series},
        )
    return _of_the_first(first)


def _of_the_first(panel: Panel) -> Panel:
    return replace(panel, caption=f"{panel.caption} Of the first seed.")


def _points(panel: Lines) -> tuple[tuple[str, tuple[float, ...]], ...]:
    return tuple((line.label, tuple(line.x)) for line in panel.lines)


def _names(panel: Bars) -> tuple[tuple[str, ...], ...]:
    return tuple(panel.groups), tuple(panel.series)


def _ranges(values: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    return [(min(each), max(each)) for each in zip(*values, strict=True)]
