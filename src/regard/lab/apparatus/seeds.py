"""One experiment with several seeds: what it found becomes ranges over them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

from regard.errors import RegardError
from regard.lab.apparatus.experiments import Check, Experiment, Result, Tell
from regard.lab.apparatus.panel_ranges import panels_over_seeds

NUMBER = r"[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?"
FIGURE = re.compile(
    rf"(?<![\w.–])(?:(?<!from )({NUMBER})%? to |({NUMBER})%?(–))?({NUMBER})(%?)(?![\w–])"
)
"""A number, or a range of two ("60% to 64%", "9–12"); but "from 1 to 2" is two numbers."""
BEFORE = re.compile(r"(from|between|to|to the|→) $")
AFTER = re.compile(r" (to|→)\b|%? →")
"""Words beside which a range written with "to" would be misread ("from 1 to 2 to 3")."""


def run_seeds(
    experiment: Experiment, seeds: int, *, seed: int = 0, progress: Tell | None = None, **how: Any
) -> Result:
    """Run an experiment with so many seeds from one on.

    >>> from regard.lab.apparatus.experiments import experiment
    >>> result = run_seeds(experiment("roles"), 2, width=16, steps=1)
    >>> result.settings["seeds"], len(result.numbers["seeds"])
    ([0, 1], 2)
    """
    if seeds < 1:
        raise RegardError("seeds= says how many to run", got=str(seeds), accepted="1 or more")
    if "seeds" in signature(experiment.run).parameters:
        return experiment.run(seed=seed, seeds=seeds, progress=progress, **how)

    def tell(i: int, what: str, done: int, total: int) -> None:
        if progress is not None:
            progress(what, i * total + done, seeds * total)

    return over_seeds(
        [experiment.run(seed=seed + i, progress=partial(tell, i), **how) for i in range(seeds)]
    )


def over_seeds(results: Sequence[Result]) -> Result:
    """One result of several: a part of the claim holds if it does with every seed, figures are
    ranges, panels are those of the first with ranges drawn in."""
    first = results[0]
    if len(results) == 1:
        return first
    seeds = [result.settings["seed"] for result in results]
    settings = {name: value for name, value in first.settings.items() if name != "seed"}
    ranges = f"Ranges are over {len(seeds)} seeds; pictures are of the first, bands in them of all."
    return replace(
        first,
        settings={"seeds": seeds, **settings},
        checks=tuple(map(_check, zip(*(result.checks for result in results), strict=True))),
        answer=f"{merged([result.answer for result in results])} {ranges}",
        numbers={"seeds": [dict(result.numbers) for result in results]},
        panels=panels_over_seeds([result.panels for result in results]),
    )


def _check(checks: tuple[Check, ...]) -> Check:
    """A part of the claim over all seeds."""
    held = sum(check.holds for check in checks)
    found = merged([check.found for check in checks])
    if 0 < held < len(checks):
        found += f"; holds with {held} of {len(checks)} seeds"
    return Check(merged([check.says for check in checks]), found, held == len(checks))


def merged(texts: Sequence[str]) -> str:
    """Texts that differ in their figures, as one with ranges. Sentences that differ otherwise
    are given one after the other.

    >>> merged(["62% of 256 are right.", "60% of 256 are right."])
    '60 to 62% of 256 are right.'
    >>> merged(["It scores 11% to 19%, from 1.9 to 2.", "It scores 12% to 20%, from 1.8 to 2."])
    'It scores 11 to 20%, from 1.8–1.9 to 2.'
    >>> merged(["One. It does.", "One. It does not."])
    'One. With some seeds: It does. With others: It does not.'
    """
    sentences = [re.split(r"(?<=[.?!]) (?=[A-Z“\"])", text) for text in texts]
    if len({len(each) for each in sentences}) > 1:
        return _apart(texts)
    return " ".join(_sentence(each) for each in zip(*sentences, strict=True))


def _sentence(variants: Sequence[str]) -> str:
    if len({FIGURE.sub("#", one) for one in variants}) > 1:
        return _apart(variants)
    figures = zip(*([*FIGURE.finditer(one)] for one in variants), strict=True)
    ranges = iter([_range(each) for each in figures])
    one = FIGURE.sub(lambda _: next(ranges), variants[0])
    # From the lowest end to the highest of several intervals is none of them.
    return one if one == variants[0] else one.replace(" interval ", " intervals from ")


def _apart(variants: Sequence[str]) -> str:
    some, *others = dict.fromkeys(variants)
    return " ".join([f"With some seeds: {some}", *(f"With others: {one}" for one in others)])


def _range(figures: Sequence[re.Match[str]]) -> str:
    """The least and the largest of one figure, as they were printed."""
    printed = {figure[0] for figure in figures}
    if len(printed) == 1:
        return printed.pop()
    ends = [number for figure in figures for number in figure.group(1, 2, 4) if number]
    low, high = (pick(ends, key=_value) for pick in (min, max))
    percent = figures[0][5]
    if _value(low) == _value(high):
        return f"{low}{percent}"
    if not any(figure[3] == "–" or _beside_to(figure) for figure in figures):
        return f"{low} to {high}{percent}"
    if low[0] in "+-" or high[0] in "+-":
        return f"between {low} and {high}{percent}"
    return f"{low}–{high}{percent}"


def _beside_to(figure: re.Match[str]) -> bool:
    text, (start, end) = figure.string, figure.span()
    return bool(BEFORE.search(text[:start]) or AFTER.match(text[end:]))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
