"""Several seeds of one experiment, told as one result."""

from __future__ import annotations

import re
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regard import RegardError, cli
from regard.commands import lab as lab_command
from regard.lab.apparatus.experiments import (
    NAMES,
    About,
    Check,
    Experiment,
    Result,
    Tell,
    experiment,
)
from regard.lab.apparatus.panels import Bars
from regard.lab.apparatus.seeds import merged, over_seeds, run_seeds

DOCS = Path(__file__).parents[3] / "docs"
ABOUT = About("toy", "A toy", "It works.", ("It is tried.",), ("Try it.",), {"size": 2}, seeds=3)


RANGES = "Ranges are over 3 seeds; pictures are of the first, bands in them of all."
BARS = Bars("bars", "A few.", "right", ["all"], {"toy": [0.6]})


def toy(*, seed: int = 0, size: int = 1, progress: Tell | None = None) -> Result:
    if progress is not None:
        progress("trying", 1, 1)
    check = Check("most are right", f"{60 + seed}%", seed < 2)
    settings = {"seed": seed, "size": size}
    return Result(ABOUT, settings, (check,), f"{60 + seed}% of 8.", {"right": 60 + seed}, ())


def test_figures_become_ranges_and_a_claim_holds_with_every_seed_or_not() -> None:
    told: list[tuple[int, int]] = []
    result = run_seeds(
        Experiment(ABOUT, toy), 3, progress=lambda what, done, total: told.append((done, total))
    )
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert result.answer == "60 to 62% of 8. " + RANGES
    assert result.checks == (Check("most are right", "60 to 62%; holds with 2 of 3 seeds", False),)
    assert result.settings == {"seeds": [0, 1, 2], "size": 1}
    assert [one["right"] for one in result.numbers["seeds"]] == [60, 61, 62]
    assert over_seeds([toy(seed=s) for s in (0, 1)]).supported
    alone = toy(seed=1)
    assert over_seeds([alone]) is alone


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("1,234 words at -0.04", "987 words at 0.1"), "987 to 1,234 words at -0.04 to 0.1"),
        (("3e-22 of it, d = 16", "1e-19 of it, d = 16"), "3e-22 to 1e-19 of it, d = 16"),
        (("52 to 60% here", "55% here"), "52 to 60% here"),
        (("52% to 60% here", "50% to 55% here"), "50 to 60% here"),
        (("from 1.9 to 2.5", "from 1.8 to 2.6"), "from 1.8–1.9 to 2.5–2.6"),
        (("from 1.9 to 2", "from 1.8 to 2"), "from 1.8–1.9 to 2"),
        (("from 1.8–1.9 to 2", "from 1.7 to 2.1"), "from 1.7–1.9 to 2–2.1"),
        (("from 52% to 60%", "from 50% to 61%"), "from 50–52% to 60–61%"),
        (("from -0.25 to 0", "from -0.2 to 0.1"), "from between -0.25 and -0.2 to 0–0.1"),
        (("up to 16 away", "up to 24 away"), "up to 16–24 away"),
        (("as n to the 0.98 here", "as n to the 1.02 here"), "as n to the 0.98–1.02 here"),
        (("it leans +0.20 to one", "it leans +0.25 to one"),
         "it leans between +0.20 and +0.25 to one"),
        (("1.99 → 2.51, 3 more", "1.98 → 2.53, 4 more"), "1.98–1.99 → 2.51–2.53, 3 to 4 more"),
        (("0.5, 95 % interval 0.4 to 0.6", "0.5, 95 % interval 0.3 to 0.5"),
         "0.5, 95 % intervals from 0.3 to 0.6"),
        (("1, 95 % interval 0 to 2", "1, 95 % interval 0 to 2"), "1, 95 % interval 0 to 2"),
        (("sentences of 9–12", "sentences of 9–12"), "sentences of 9–12"),
        (("sentences of 9–12", "sentences of 8–11"), "sentences of 8–12"),
        (("1.50 and 1.5", "1.5 and 1.5"), "1.50 and 1.5"),
        (("A lot. 3 of 4.", "A lot. 2 of 4."), "A lot. 2 to 3 of 4."),
        (("Cats. One.", "Dogs. One.", "Cats. One."),
         "With some seeds: Cats. With others: Dogs. One."),
        (("One.", "One. Two."), "With some seeds: One. With others: One. Two."),
    ],
)  # fmt: skip
def test_texts_are_merged_by_their_figures(texts: tuple[str, ...], said: str) -> None:
    assert merged(texts) == said


def test_an_experiment_that_takes_seeds_itself_is_given_them() -> None:
    def run(*, seed: int, seeds: int, progress: Tell | None) -> Result:
        return replace(toy(), settings={"seed": seed, "seeds": seeds})

    result = run_seeds(Experiment(ABOUT, run), 4, seed=7)
    assert result.settings == {"seed": 7, "seeds": 4}


def test_no_seeds_are_refused() -> None:
    with pytest.raises(RegardError, match=r"how many to run\n  got: +0"):
        run_seeds(Experiment(ABOUT, toy), 0)


def test_the_command_takes_as_many_seeds_as_the_experiment_says_or_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []

    def run(*, seed: int = 0, progress: Tell | None = None, **how: object) -> Result:
        seeds.append(seed)
        return replace(toy(), settings={"seed": seed, **how}, panels=(BARS,))

    monkeypatch.setattr(lab_command, "experiment", lambda _: Experiment(ABOUT, run))
    asked = (([], [0, 1, 2]), (["--seeds", "1", "--seed", "5"], [5]), (["--full"], [0]))
    for more, expected in asked:
        seeds.clear()
        done = CliRunner().invoke(cli.app, ["lab", "roles", "-o", str(tmp_path), *more])
        assert done.exit_code == 0, done.output
        assert seeds == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_says_how_many_seeds_it_is_run_with(name: str) -> None:
    assert experiment(name).about.seeds in (1, 3)


def test_the_docs_say_which_are_run_with_three() -> None:
    text = " ".join((DOCS / "lab.md").read_text("utf-8").split())
    said = re.search(r"Unless said, ([^.]*) are run with three seeds", text)
    assert said is not None
    three = {name for name in NAMES if experiment(name).about.seeds == 3}
    assert set(re.findall(r"`(\w+)`", said[1])) == three


def test_only_experiments_that_give_ranges_themselves_are_handed_the_number_of_seeds() -> None:
    taking = [name for name in NAMES if "seeds" in signature(experiment(name).run).parameters]
    assert taking == ["scaling", "heads"]
