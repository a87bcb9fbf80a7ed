"""Panels of several seeds become one, with ranges where these can be drawn."""

from __future__ import annotations

from dataclasses import replace

from matplotlib.collections import PolyCollection

from regard.lab.apparatus.experiments import About, Result
from regard.lab.apparatus.panel_ranges import panels_over_seeds
from regard.lab.apparatus.panels import Bars, HeatMap, Line, Lines, Panel
from regard.view.pictures.lab_picture import lab_picture

ABOUT = About("toy", "A toy", "It works.", ("It is tried.",), ("Try it.",))


def panels(seed: int) -> tuple[Lines, Bars, HeatMap]:
    y = [0.2 + 0.1 * seed, 0.5 - 0.1 * seed]
    return (
        Lines("Lines", "As they go.", "step", "share", [Line("toy", [1, 2], y)]),
        Bars("Bars", "As they are.", "share", ["a", "b"], {"toy": y, "other": [0.1, 0.1]}),
        HeatMap("Heat", "A map.", [[0.1 * seed, 1.0]], ["r"], ["c", "d"], "weight"),
    )


def result(drawn: tuple[Panel, ...], **settings: object) -> Result:
    return Result(ABOUT, settings, (), "", {}, drawn)


def test_lines_and_bars_get_ranges_and_captions_say_of_which_seeds() -> None:
    lines, bars, heat = panels_over_seeds([panels(seed) for seed in (1, 0, 2)])
    assert isinstance(lines, Lines)
    assert isinstance(bars, Bars)
    assert lines.lines[0].y == panels(1)[0].lines[0].y
    assert lines.lines[0].ranges == [(0.2, 0.4), (0.3, 0.5)]
    assert bars.ranges == {"toy": [(0.2, 0.4), (0.3, 0.5)], "other": [(0.1, 0.1), (0.1, 0.1)]}
    assert lines.caption == "As they go. Lines are of the first seed, bands of 3 seeds."
    assert bars.caption == "As they are. Bars are of the first seed, lines over them of 3 seeds."
    assert heat == replace(panels(1)[2], caption="A map. Of the first seed.")


def test_panels_that_differ_in_more_than_numbers_are_those_of_the_first() -> None:
    lines, bars, heat = panels(0)
    others = (
        replace(lines, lines=[Line("another", [1, 2], [0.0, 0.0])]),
        replace(bars, groups=["a", "c"]),
        heat,
    )
    for each in (others, others[:2]):
        merged = panels_over_seeds([(lines, bars, heat), each])
        assert [panel.title for panel in merged] == ["Lines", "Bars", "Heat"]
        assert all(panel.caption.endswith(". Of the first seed.") for panel in merged)
        assert not any(panel.has_ranges for panel in merged if isinstance(panel, Lines | Bars))


def test_one_seed_is_left_as_it_is() -> None:
    assert panels_over_seeds([panels(3)]) == panels(3)


def test_a_picture_draws_ranges_and_says_of_which_seeds_it_is() -> None:
    merged = panels_over_seeds([panels(0), panels(1)])
    figure = lab_picture(result(merged, seeds=[4, 5]))
    said = "Of seed 4; bands, and lines over bars, of seeds 4 to 5."
    assert figure.get_supxlabel() == said
    lines, bars, *_ = figure.axes
    (band,) = (drawn for drawn in lines.collections if isinstance(drawn, PolyCollection))
    low, high = band.get_datalim(lines.transData).intervaly
    assert (round(low, 6), round(high, 6)) == (0.2, 0.5)
    assert isinstance(merged[1], Bars)
    over = [[*map(float, line.get_ydata())] for line in bars.lines]
    assert over == [[*pair] for name in ("toy", "other") for pair in merged[1].ranges[name]]


def test_a_picture_of_one_seed_says_nothing_of_others() -> None:
    assert lab_picture(result(panels(0), seed=0)).get_supxlabel() == ""
    first = lab_picture(result(panels(0), seed=7, seeds=3))
    assert first.get_supxlabel() == "Of seed 7, the first of 3."
