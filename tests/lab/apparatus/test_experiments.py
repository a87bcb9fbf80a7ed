"""The frame of the lab, its command, picture and page."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from regard import RegardError, cli, view
from regard.commands import lab as lab_command
from regard.commands.console import ProgressLines
from regard.commands.lab import _heading
from regard.lab import scaling
from regard.lab.apparatus.experiments import NAMES, Check, Experiment, Result, experiment, seeded
from regard.lab.apparatus.panels import Bars, Graph, HeatMap, Line, Lines, Point
from regard.view.pictures.lab_page import lab_page
from regard.view.pictures.lab_picture import lab_picture


@pytest.fixture(scope="module")
def result() -> Result:
    return scaling.run(widths=(16, 64), samples=16, steps=0)


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_says_what_it_claims_and_does(name: str) -> None:
    about = experiment(name).about
    assert about.name == name
    assert about.claim.endswith(".")
    assert about.method
    assert about.change
    assert about.full


def test_the_files_of_the_lab_are_its_experiments() -> None:
    files = Path(scaling.__file__).parent.glob("*.py")
    assert sorted(path.stem for path in files) == sorted([*NAMES, "__init__"])


def test_unknown_experiments_are_refused() -> None:
    with pytest.raises(RegardError, match=r"no experiment of that name\n  got: +'sorcery'"):
        experiment("sorcery")


def test_a_result_that_does_not_support_its_claim_says_so(result: Result, tmp_path: Path) -> None:
    checks = (Check("pigs fly", "none did", False),)
    failed = replace(result, checks=checks, panels=result.panels[:1])
    assert not failed.supported
    assert failed.verdict == 'None of it is supported: "pigs fly" does not hold (none did).'
    page = lab_page(failed, tmp_path / "page.html").read_text()
    assert "✗ does not hold" in page
    assert "✓ holds" not in page
    assert json.loads(failed.json())["supported"] is False


def test_seeds_fix_the_numbers_and_leave_the_callers_alone() -> None:
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second, other = (
        scaling.run(seed=seed, widths=(16, 64), samples=16, steps=1).json() for seed in (0, 0, 1)
    )
    assert first == second
    assert first.replace('"seed": 0', '"seed": 1') != other
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert torch.tensor(1e-40).mul(1.0) > 0


def test_an_experiment_that_fails_leaves_threads_alone() -> None:
    threads = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), seeded(0):
        raise ZeroDivisionError
    assert torch.get_num_threads() == threads


def test_the_command_lists_runs_and_writes(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = CliRunner()
    listed = runner.invoke(cli.app, ["lab"])
    assert all(name in listed.stdout for name in NAMES)
    asked = []

    def run(*, seeds: int = 1, progress: object, **how: object) -> Result:
        asked.append({"seeds": seeds, **how})
        return result

    monkeypatch.setattr(lab_command, "experiment", lambda _: Experiment(scaling.ABOUT, run))
    done = runner.invoke(cli.app, ["lab", "scaling", "--full", "--seed", "3", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert asked == [{"seed": 3, **scaling.ABOUT.full}]
    assert " ".join(result.answer.split()[:8]) in " ".join(done.stdout.split())
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "scaling.json").read_text())["claim"] == scaling.ABOUT.claim


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(cli.app, ["lab", "scaling", "-o", str(tmp_path / "file")])
    assert done.exit_code == 2
    assert "the folder for the results cannot be made" in done.output
    assert "name another with --out" in done.output


def test_numbers_that_are_not_finite_are_null(result: Result) -> None:
    odd = replace(result, numbers={"far": [float("inf"), 1.0], "unknown": {"x": float("nan")}})
    assert json.loads(odd.json())["numbers"] == {"far": [None, 1.0], "unknown": {"x": None}}


def test_the_page_needs_nothing_else(result: Result, tmp_path: Path) -> None:
    page = lab_page(result, tmp_path / "page.html").read_text("utf-8")
    assert not re.search(r"https?://|<script|<link|@import", page)
    assert page.count("data:image/png;base64,") == 2 * len(result.panels)
    assert "Content-Security-Policy" in page
    for text in (*scaling.ABOUT.method, *scaling.ABOUT.change, result.answer):
        assert text.replace("'", "&#x27;") in page


def test_bars_and_heat_maps_are_drawn(result: Result) -> None:
    panels = (
        Bars("Bars", "Some bars.", "share", ["a", "b"], {"x": [0.2, 0.4], "y": [1.0, 0.0]}, True),
        HeatMap(
            "Heat", "A map.", [[0.0, -2.0], [1.0, 0.5]], ["r", "s"], ["c", "d"], "w", signed=True
        ),
    )
    figure = lab_picture(replace(result, panels=panels))
    bars, heat = figure.axes[:2]
    assert [round(bar.get_height(), 2) for bar in bars.patches] == [0.2, 0.4, 1.0, 0.0]
    assert heat.images[0].get_clim() == (-2.0, 2.0)


def test_names_of_many_rows_do_not_touch(result: Result) -> None:
    names = [f"word {i}" for i in range(20)]
    heat = HeatMap("Heat", "A map.", [[1.0] * 20] * 20, names, names, "weight")
    figure = lab_picture(replace(result, panels=(heat, heat, heat, heat)))
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].get_yticklabels()]
    assert all(below.y1 <= above.y0 for above, below in pairwise(boxes))


def test_without_matplotlib_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    for name in [n for n in sys.modules if n.startswith("regard.view.picture")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("picture", "pictures"):
        # Not delattr, which asks first whether it is there: that would import it.
        monkeypatch.delitem(vars(view), name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "new" / "folder"
    done = CliRunner().invoke(cli.app, ["lab", "scaling", "--out", str(out)])
    assert done.exit_code == 2, done.output
    assert "pictures are drawn with matplotlib, which is not installed" in done.stderr
    assert "pip install 'regard[picture]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_progress_in_a_pipe_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 5.0, 20.0, 21.0, 40.0, 60.0])
    lines = ProgressLines(every=15, now=lambda: next(clock))
    for done in (1, 5, 6, 8, 10):
        lines.tell("training", done, 10)
    assert capsys.readouterr().err.splitlines() == [
        "training: 50% after 20 s, about 19 s left",
        "training: 80% after 40 s, about 10 s left",
    ]


def test_what_comes_before_the_first_step_is_not_taken_for_its_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = iter([0.0, 37.0, 53.0])
    lines = ProgressLines(every=15, now=lambda: next(clock))
    lines.tell("training", 1, 1000)
    lines.tell("training", 33, 1000)
    assert capsys.readouterr().err == "training: 3% after 53 s, about 484 s left\n"


def test_an_experiment_that_takes_long_says_so_in_its_first_line() -> None:
    long = experiment("bottleneck").about
    said = _heading(long, full=False, seeds=None).plain
    assert said.splitlines()[0] == f"{long.title} (takes four to five minutes of one core)"
    more = _heading(long, full=True, seeds=2).plain.splitlines()[0]
    assert more.endswith("of one core, for each seed and longer with --full)")
    short = experiment("roles").about
    assert _heading(short, full=False, seeds=None).plain.splitlines()[0] == short.title


def test_names_that_had_to_move_are_led_to_and_short_log_axes_have_numbers(result: Result) -> None:
    lines = [Line("one", [4, 8], [2.0, 3.0]), Line("two", [4, 8], [4.0, 3.001]),
             Line("far", [4, 8], [4.0, 6.0])]  # fmt: skip
    panel = Lines("Close", "Two ends.", "d", "y", lines, log_x=True, log_y=True)
    figure = lab_picture(replace(result, panels=(panel,)))
    figure.canvas.draw()
    (axes,) = figure.axes
    assert {line.get_gid() for line in axes.lines} == {None, "leader"}
    assert sum(line.get_gid() == "leader" for line in axes.lines) == 1
    low, high = axes.get_ylim()
    named = [t for t in axes.yaxis.get_majorticklocs() if low <= t <= high]
    assert named == pytest.approx([2, 5])
    low, high = axes.get_xlim()
    assert [t for t in axes.xaxis.get_majorticklocs() if low <= t <= high] == pytest.approx([4, 8])


def test_a_graph_is_drawn_with_edges_as_wide_as_their_weights(result: Result) -> None:
    points = [Point("a", (0, 0), "x"), Point("", (1, 0), "y"), Point("", (1, 1), "y")]
    panel = Graph("Graph", "Three nodes.", points, {(0, 1): 1.0, (1, 2): 0.5})
    (axes,) = lab_picture(replace(result, panels=(panel,))).axes
    wide, narrow = axes.lines
    assert wide.get_linewidth() > narrow.get_linewidth()
    assert wide.get_xydata().tolist() == [[0, 0], [1, 0]]
    assert [len(dots.get_offsets()) for dots in axes.collections] == [1, 2]
