"""Where reports go. Weights & Biases and MLflow by stand-ins that take what the real ones take."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regard import RegardError
from regard.monitoring import Finding, Report
from regard.monitoring.writers import (
    Function,
    JsonLines,
    MLflow,
    TensorBoard,
    WeightsAndBiases,
    Writer,
    writers,
)
from tests.monitoring.test_rules import report

FOUND = Finding(
    "sink head", 50, "a", 1, "a share of", 0.99, "above 0.9", (0.5, 0.99), {}, "nothing"
)
REPORT = report(50, **{"layers.0[x]": {}})
WITH = Report(REPORT.step, REPORT.looks, REPORT.layers, (FOUND,))


def test_json_lines_hold_every_head_and_go_on_where_they_ended(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for r in (REPORT, WITH):
        writer = JsonLines(path)
        writer.write(r)
        # The line is there before the file is closed.
        assert path.read_text().endswith("\n")
        writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [50, 50]
    assert lines[0]["layers"]["layers.0[x]"]["max_logit"] == [5, 6]
    assert lines[0]["findings"] == []
    assert lines[1]["findings"][0]["trend"] == [0.5, 0.99]


def test_json_lines_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="reports cannot be written there"):
        JsonLines(tmp_path / "nowhere" / "run.jsonl")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard(tmp_path, heads=True)
    writer.write(WITH)
    writer.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    [largest] = found.Scalars("attention/layers.0[x]/max_logit")
    assert (largest.step, largest.value) == (50, 6)
    [of_head] = found.Scalars("attention/layers.0[x]/sink/head_1")
    assert of_head.value == pytest.approx(0.2)
    assert "attention/sink head/text_summary" in found.Tags()["tensors"]


class FakeSummary:
    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int]] = {}
        self.texts: dict[str, str] = {}
        self.closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name] = value, step

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts[name] = text

    def close(self) -> None:
        self.closed = True


def test_a_summary_writer_is_used_and_left_open() -> None:
    summary = FakeSummary()
    [writer] = writers(summary)
    writer.write(REPORT)
    writer.close()
    assert summary.scalars["attention/layers.0[x]/max_logit"] == (6, 50)
    assert not any("head_" in name for name in summary.scalars)
    assert not summary.closed


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.metrics: list[tuple[str, str]] = []
        self.alerts: list[str] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, numbers: dict[str, float]) -> None:
        self.logged.append(numbers)

    def alert(self, title: str, text: str) -> None:
        self.alerts.append(title)


@pytest.mark.parametrize("how", ["run", "name"])
def test_weights_and_biases(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    [writer] = writers(run if how == "run" else "wandb")
    assert isinstance(writer, WeightsAndBiases)
    writer.write(WITH)
    writer.close()
    assert run.metrics == [("attention/*", "attention/step")]
    assert run.logged[0]["attention/step"] == 50
    assert run.logged[0]["attention/layers.0[x]/entropy_min"] == 0.5
    assert run.alerts == ["sink head at step 50"]


def test_weights_and_biases_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    with pytest.raises(RegardError, match=r"wandb\.init"):
        writers("wandb")


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    def log_metrics(numbers: dict[str, float], step: int, run_id: str | None) -> None:
        logged.append((numbers, step, run_id))

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(log_metrics=log_metrics))
    [writer] = writers("mlflow")
    writer.write(REPORT)
    MLflow("17", heads=True).write(REPORT)
    (numbers, step, run), (each, _, named) = logged
    assert (step, run, named) == (50, None, "17")
    # MLflow refuses brackets in names.
    assert numbers["attention/layers.0_x_/max_logit"] == 6
    assert len(each) > len(numbers)


@pytest.mark.parametrize(
    ("package", "to"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("tensorboard", "runs")]
)
def test_packages_that_are_not_there(
    package: str, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RegardError, match=f"{package} is not installed") as told:
        writers(to)
    assert f"pip install {package}" in str(told.value)


def test_several_at_once_and_functions(tmp_path: Path) -> None:
    got: list[Report] = []
    found = writers([tmp_path / "a.jsonl", got.append, [str(tmp_path / "b.jsonl")]])
    assert [type(writer) for writer in found] == [JsonLines, Function, JsonLines]
    for writer in found:
        assert isinstance(writer, Writer)
        writer.write(REPORT)
        writer.close()
    assert got == [REPORT]
    assert writers(None) == []
    assert writers(found[0]) == [found[0]]


@pytest.mark.parametrize(
    "to", ["run.json", 7, object()], ids=["a suffix nobody knows", "a number", "an object"]
)
def test_what_is_no_place_for_reports(to: Any) -> None:
    with pytest.raises(RegardError, match=r"a path that ends in \.jsonl"):
        writers(to)


def test_folders_with_numbers_behind_a_dot_are_folders(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    there = tmp_path / "run.of.today"
    there.mkdir()
    for folder in (tmp_path / "lr0.001", tmp_path / "v1.2", there):
        [writer] = writers(str(folder))
        assert isinstance(writer, TensorBoard)
        writer.close()
    with pytest.raises(RegardError, match="to= says where reports go"):
        writers(str(tmp_path / "run.csv"))
