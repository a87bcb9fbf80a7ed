"""Reports that cannot be written: training goes on, lines catch up, and what is lost is named."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import regard
from regard import RegardError
from regard.monitoring import Report
from regard.monitoring.troubles import Troubles
from regard.monitoring.writers import MLflow, TensorBoard, WeightsAndBiases, json_lines, writers
from regard.monitoring.writers.json_lines import JsonLines
from regard.monitoring.writers.lost_reports import listed
from regard.monitoring.writers.outlets import Outlet
from tests.monitoring.test_monitor import told_of
from tests.monitoring.test_rules import report
from tests.monitoring.writers.full_disk import full_disk
from tests.watching.test_left_behind import _interrupting
from tests.watching.test_watch import X, hooks, model


def steps(path: Path) -> list[int]:
    """Of all lines; each is whole."""
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def run(monitor: regard.Monitor, times: int = 1) -> list[str]:
    """What the monitor says while steps are run."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(times):
            monitor.model(X)
            monitor.step()
    return [str(warning.message) for warning in told]


def test_training_goes_on_and_the_lines_catch_up(tmp_path: Path) -> None:
    path, beside = tmp_path / "run.jsonl", []
    monitor = regard.Monitor(model(), every=1, to=[path, beside.append], rules=())
    assert run(monitor, 2) == []
    with full_disk(path.stat().st_size + 100):
        [told] = run(monitor, 3)
    assert "the monitor failed while writing a report" in told
    assert "training goes on" in told
    assert f"{path} cannot be written to now" in told
    assert "File too large" in told
    assert "catches up" in told
    assert [r.step for r in beside] == [1, 2, 3, 4, 5]
    assert run(monitor, 1) == []
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    told_of(monitor.close)


def test_the_lines_catch_up_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    monitor = regard.Monitor(model(), every=1, to=path, rules=())
    with full_disk(10):
        assert len(run(monitor, 3)) == 1
    told_of(monitor.close)
    assert steps(path) == [1, 2, 3]


def test_what_was_lost_is_named_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    monitor = regard.Monitor(model(), every=2, look=1, to=path, rules=())
    run(monitor, 2)
    with full_disk(path.stat().st_size + 7):
        run(monitor, 6)
        told_of(monitor.close, r"reports are lost.*\n.*run\.jsonl.*steps 4 to 8 every 2")
    whole, torn = path.read_text().split("\n")
    assert (json.loads(whole)["step"], len(torn)) == (2, 7)
    # The next run begins on a line of its own.
    with regard.Monitor(model(), every=1, to=path, rules=()) as monitor:
        assert run(monitor) == []
    assert path.read_text().splitlines()[1] == torn
    assert json.loads(path.read_text().splitlines()[2])["step"] == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_device_that_is_full(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    monitor = regard.Monitor(model(), every=1, to=tmp_path / "run.jsonl", rules=())
    [told] = run(monitor, 3)
    assert "No space left" in told
    told_of(monitor.close, r"reports are lost.*\n.*No space left.*steps 1 to 3")


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    read, write = os.pipe()
    place = JsonLines(f"/dev/fd/{write}")
    for r in (report(1, a={}), report(2, a={})):
        place.write(r)
    place.close()
    os.close(write)
    with open(read) as lines:
        assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_disk_that_fills_in_the_middle_of_a_line_and_fills_again(
    tmp_path: Path, times: int
) -> None:
    path = tmp_path / "run.jsonl"
    place = JsonLines(path)
    for n in range(times):
        with full_disk(50 * (n + 1)), pytest.raises(RegardError, match="cannot be written to"):
            place.write(report(n, a={}))
        assert path.stat().st_size == 50 * (n + 1)
    place.write(report(times, a={}))
    place.close()
    assert steps(path) == list(range(times + 1))
    assert place.lost == []


@pytest.mark.parametrize("part", [1, 2])
def test_what_was_written_when_ctrl_c_came_is_not_written_again(tmp_path: Path, part: int) -> None:
    place = JsonLines(tmp_path / "run.jsonl")
    file = place._file

    class Interrupted:
        fileno = file.fileno

        def write(self, text: bytes) -> int:
            file.write(text[: len(text) // part])
            raise KeyboardInterrupt

    place._file = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        place.write(report(1, a={}))
    place._file = file
    place.write(report(2, a={}))
    place.close()
    assert steps(tmp_path / "run.jsonl") == [1, 2]


def test_a_file_that_somebody_else_empties_or_adds_to(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    place = JsonLines(path)
    for others in (b"", b"half a line of somebody"):
        with full_disk(20), pytest.raises(RegardError):
            place.write(report(1, a={}))
        path.write_bytes(others)
        place.write(report(2, a={}))
        *before, one, two = path.read_text().splitlines()
        assert before == ([others.decode()] if others else [])
        assert [json.loads(line)["step"] for line in (one, two)] == [1, 2]
        path.write_bytes(b"")
    place.close()


def test_a_disk_that_stays_full_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "_MOST_WAITING", 2000)
    place = JsonLines(tmp_path / "run.jsonl")
    with full_disk(0):
        for n in range(50):
            with pytest.raises(RegardError):
                place.write(report(n, a={}))
    held = sum(len(line.text) for line in place._waiting)
    assert 1000 < held <= 2000
    place.write(report(50, a={}))
    with pytest.raises(RegardError, match=r"reports are lost.*\n.*steps 0 to"):
        place.close()
    there = steps(tmp_path / "run.jsonl")
    assert sorted(place.lost + there) == list(range(51))
    assert there == list(range(51 - len(there), 51))
    assert place.lost


def test_the_file_is_synced_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(
        json_lines.os, "fsync", lambda n: (synced.append(os.fstat(n).st_size), fsync(n))
    )
    place = JsonLines(tmp_path / "run.jsonl")
    place.write(report(7, a={}))
    # Training does not wait for a disk.
    assert synced == []
    place.close()
    assert synced == [(tmp_path / "run.jsonl").stat().st_size]
    place.close()


def test_a_disk_that_says_late_that_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems take a write and refuse it when the file is synced."""

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    place = JsonLines(tmp_path / "run.jsonl")
    place.write(report(7, a={}))
    monkeypatch.setattr(json_lines.os, "fsync", full)
    with pytest.raises(RegardError, match=r"run\.jsonl may not be whole on disk"):
        place.close()
    assert place._file.closed


def test_no_file_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    before = _open_files()
    with pytest.raises(RegardError, match="mlflow is not installed"):
        writers([tmp_path / "a.jsonl", [tmp_path / "b.jsonl"], "mlflow"])
    assert _open_files() == before


def _open_files() -> int:
    return sum(_is_open(number) for number in range(200))


def _is_open(number: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(number).st_mode)
    except OSError:
        return False


class Fails:
    """A place for reports that fails at some steps, and in closing if told to."""

    def __init__(self, *at: int, closing: bool = False) -> None:
        self.at, self.closing, self.got, self.closed = at, closing, list[int](), 0

    def write(self, report: Report) -> None:
        if report.step in self.at:
            raise ConnectionError(f"{report.step} from object at {id(report):#x}")
        self.got.append(report.step)

    def close(self) -> None:
        self.closed += 1
        if self.closing:
            raise OSError(f"cannot close {self.at}")


def test_any_place_is_told_of_once_and_what_it_missed_is_named() -> None:
    first, second = Fails(2, 3, 5, 9), Fails(4)
    monitor = regard.Monitor(model(), every=1, to=[first, second], rules=())
    told = run(monitor, 10)
    assert [("from object at" in text, "(Fails)" in text) for text in told] == [(True, True)] * 2
    assert first.got == [1, 4, 6, 7, 8, 10]
    assert second.got == [1, 2, 3, *range(5, 11)]
    told_of(monitor.close, r"lost.*\n.*Fails, steps 2, 3, 5, 9\n", r"Fails, steps 4\n")
    assert (first.closed, second.closed) == (1, 1)


class Nowhere(SimpleNamespace):
    """A run of Weights & Biases, MLflow or a SummaryWriter that reaches nobody."""

    def fail(self, *args: Any, **options: Any) -> None:
        raise ConnectionError(f"cannot reach port {time.monotonic_ns()}")

    log = log_metrics = add_scalar = fail

    def define_metric(self, name: str, step_metric: str) -> None:
        pass


def test_services_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", Nowhere())
    path, heard = tmp_path / "run.jsonl", list[int]()
    services = [WeightsAndBiases(Nowhere()), MLflow(), TensorBoard(Nowhere()), Nowhere().fail]
    everywhere = [*services, path, lambda report: heard.append(report.step)]
    monitor = regard.Monitor(model(), every=1, to=everywhere, rules=())
    told = run(monitor, 4)
    names = ["WeightsAndBiases", "MLflow", "TensorBoard", "Function"]
    assert [name in text for name, text in zip(names, told, strict=True)] == [True] * 4
    assert steps(path) == heard == [1, 2, 3, 4]
    told_of(monitor.close, *(rf"reports are lost.*\n.*{name}, steps 1 to 4" for name in names))


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_each_is_written_to_and_closed_whatever_the_others_do(on_error: Any) -> None:
    failing, after = [Fails(1, closing=True), Fails(1, closing=True)], Fails()
    m = model()
    monitor = regard.Monitor(m, every=1, to=[*failing, after], rules=(), on_error=on_error)
    m(X)
    if on_error == "raise":
        with pytest.raises(ConnectionError, match="1 from object"):
            monitor.step()
        with pytest.raises(OSError, match="cannot close"):
            monitor.close()
    else:
        assert len(run(monitor)) >= 1
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            monitor.close()
    assert after.got[0] == 1
    assert [place.closed for place in (*failing, after)] == [1, 1, 1]
    assert hooks(m) == 0


def test_a_monitor_that_cannot_be_made_closes_all_it_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(self: Any) -> None:
        raise MemoryError("the real reason")

    monkeypatch.setattr(regard.monitoring.training_watch.TrainingWatch, "attach", failing)
    opened = [Fails(closing=True), Fails(closing=True)]
    with pytest.raises(MemoryError, match="the real reason"):
        regard.Monitor(model(), to=opened)
    assert [place.closed for place in opened] == [1, 1]


def test_an_error_that_cannot_say_what_it_is() -> None:
    class Mute(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise AttributeError("half made")

    def mute(report: Report) -> None:
        raise Mute

    with regard.Monitor(model(), every=1, to=mute, rules=()) as monitor:
        [told] = run(monitor)
        told_of(monitor.close, "reports are lost")
    assert "Mute" in told


@pytest.mark.parametrize("where", ["detach", "_end_window", "write"])
def test_a_monitor_whose_closing_is_interrupted_leaves_nothing(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, place = model(), Fails()
    monitor = regard.Monitor(m, every=5, look=1, to=place, rules=())
    m(X)
    monitor.step()
    owners = {"detach": monitor._watch, "_end_window": monitor, "write": place}
    owner = owners[where]
    monkeypatch.setattr(owner, where, _interrupted_once(getattr(owner, where)))
    with pytest.raises(KeyboardInterrupt):
        monitor.close()
    assert hooks(m) == 0
    assert place.closed == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("moment", [1, 2, 3, 5, 8, 13, 21, 34, 55])
def test_lines_that_wait_are_written_though_closing_is_interrupted(
    tmp_path: Path, moment: int
) -> None:
    monitor = regard.Monitor(model(), every=1, to=tmp_path / "run.jsonl", rules=())
    with full_disk(10):
        run(monitor, 3)
    heard = False
    outlets = monitor._outlets
    try:
        sys.setprofile(_interrupting(moment))
        outlets.close()
    except KeyboardInterrupt:
        heard = True
    finally:
        sys.setprofile(None)
    monitor.close()
    assert heard or moment > 20
    assert steps(tmp_path / "run.jsonl") == [1, 2, 3]


def _interrupted_once(call: Callable[..., Any]) -> Callable[..., Any]:
    left = [KeyboardInterrupt]

    def interrupted(*args: Any) -> Any:
        if left:
            raise left.pop()
        return call(*args)

    return interrupted


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_goes_on_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Its thread dies of the error, and would tell of it by itself.
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    place = TensorBoard(tmp_path)
    outlet = Outlet(place, Troubles(raises=False))
    outlet.write(report(1, a={}, b={}, c={}))
    # Before it is closed: a run that is killed keeps it.
    [file] = tmp_path.iterdir()
    assert b"attention/c/clipped" in file.read_bytes()
    with full_disk(10):
        outlet.write(report(2, a={}))
        outlet.write(report(3, a={}))
    assert outlet.missed == [2, 3]
    outlet.write(report(4, a={}))
    outlet.close()
    found = sorted(
        scalar.step
        for file in tmp_path.iterdir()
        for read in [EventAccumulator(str(file)).Reload()]
        if "attention/a/max_logit" in read.Tags()["scalars"]
        for scalar in read.Scalars("attention/a/max_logit")
    )
    assert found == [1, 4]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([50], "50"),
        ([50, 100], "50, 100"),
        ([50, 100, 150, 200], "50 to 200 every 50"),
        ([1, 2, 3, 4], "1 to 4"),
        ([1, 2, 3, 7, 20, 30, 40], "1 to 3, 7, 20 to 40 every 10"),
        ([3, 3, 3], "3, 3, 3"),
    ],
)
def test_steps_are_listed_shortly(numbers: list[int], said: str) -> None:
    assert listed(numbers) == said
