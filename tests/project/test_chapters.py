"""Chapters of the lab: each experiment has one, and what they do by hand runs.

The experiments themselves are run with every build of the site, where a failing cell stops it.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from regard.lab.apparatus.experiments import NAMES, Check, Result, experiment

pytest.importorskip("IPython")
CHAPTERS = Path(__file__).parents[2] / "docs/chapters"
LONG = {"heads", "counting"}
"""Experiments that show nothing in seconds: their chapters show what came out of minutes."""
CELL = re.compile(r"^```\{code-cell\}\n((?::[^\n]*\n)*)(.*?)^```$", re.DOTALL | re.MULTILINE)


def cells(name: str) -> list[str]:
    """The code of a chapter, a cell each."""
    return [code for _, code in CELL.findall((CHAPTERS / f"{name}.md").read_text("utf-8"))]


def test_every_experiment_has_a_chapter() -> None:
    assert {path.stem for path in CHAPTERS.glob("*.md")} == {*NAMES, "index"}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_chapter_does_by_hand_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its cells, with an experiment that is given, and takes only what it knows."""
    chosen, called = experiment(name), []

    def run(**how: object) -> Result:
        called.append(how)
        known = {n: p.default for n, p in inspect.signature(chosen.run).parameters.items()}
        assert how.keys() <= known.keys()
        smaller = [n for n, value in how.items() if isinstance(value, int) and value < known[n]]
        assert smaller, "a chapter is smaller than the experiment"
        return Result(chosen.about, how, (Check("", "", True),) * 4, "", {}, ())

    monkeypatch.setattr(f"regard.lab.{name}.run", run)
    place: dict[str, object] = {"__name__": name}
    for code in cells(name):
        exec(compile(code, f"{name}.md", "exec"), place)
    assert len(called) == (name not in LONG)
