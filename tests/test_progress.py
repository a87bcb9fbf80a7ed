"""Long work says how far it is: on a terminal, and not into a pipe."""

from __future__ import annotations

import ctypes
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import interpret, models
from regard.backends.tiled.loop import library
from regard.commands.console import progress_bar, shown_on
from regard.commands.scan import _Bar
from regard.models.download_bar import download_bar
from regard.notices import notice

NOTICE = "regard: building its loop in C for this CPU, once"


class Heard:
    """Standard error: a terminal, or a pipe. What is written to it is read at the other end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
        self._end, theirs = pty.openpty() if terminal else os.pipe()
        self._file = os.fdopen(theirs, "w")
        monkeypatch.setattr(sys, "stderr", self._file)
        monkeypatch.setenv("TERM", "xterm")

    def text(self) -> str:
        # Something to read, so that reading ends.
        self._file.write("<end>")
        self._file.flush()
        found = b""
        while not found.endswith(b"<end>"):
            found += os.read(self._end, 4096)
        self._file.close()
        os.close(self._end)
        return found.decode().removesuffix("<end>")


def work() -> None:
    with progress_bar() as bar:
        tell = shown_on(bar, bar.add_task("loading", total=None))
        tell("fetching", 3, 7)
        bar.refresh()
        tell("reading weights", 0, 0)
        bar.refresh()


def test_a_bar_is_shown_on_a_terminal_and_not_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(monkeypatch, terminal=True)
    work()
    shown = heard.text()
    assert "fetching" in shown
    assert "43%" in shown
    assert "reading weights" in shown
    heard = Heard(monkeypatch, terminal=False)
    work()
    assert heard.text() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_the_first_build_says_so_once_and_only_to_people(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_it(command: list[str], **_: Any) -> Any:
        Path(command[command.index("-o") + 1]).write_bytes(b"a library")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(library.subprocess, "run", compile_it)
    loaded: list[Path] = []
    monkeypatch.setattr(library, "_load", lambda path: loaded.append(path) or ctypes.CDLL(None))
    heard = Heard(monkeypatch, terminal=terminal)
    library.library()
    library.library()
    assert loaded[0] == loaded[1]
    assert heard.text().count(NOTICE) == terminal


def test_a_scan_counts_texts_once_it_knows_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(monkeypatch, terminal=True)
    with _Bar() as bar:
        bar.bar.refresh()
        bar.progress(50, 200, 600)
        bar.bar.refresh()
        # Tokens of the first part were read before the clock began.
        assert bar.bar.tasks[0].fields["speed"] == ""
        bar.progress(100, 200, 1200)
    shown = heard.text()
    assert "None" not in shown
    assert "50/200 texts" in shown


def test_a_closed_standard_error_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    notice("anything")


def test_fetching_is_told_in_bytes() -> None:
    told: list[tuple[str, int, int]] = []
    bar = download_bar(lambda *what: told.append(what))
    assert bar is not None
    files, came, written = bar(total=2), bar(total=0, unit="B"), bar(total=0, unit="B", name="x")
    came.total += 10
    written.total += 10
    came.update(4)
    written.update(1)
    files.update(1)
    came.update(6)
    assert told == [("fetching", 4, 10), ("fetching", 10, 10)]
    assert download_bar(None) is None


def test_loading_tells_its_steps(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.models.test_recorded_text import write

    write(tmp_path)
    told: list[str] = []
    models.load(str(tmp_path), device="cpu", progress=lambda doing, *_: told.append(doing))
    assert told == ["importing transformers", "reading 0 million weights"]


class Steps(list[tuple[int, int]]):
    def __call__(self, done: int, total: int) -> None:
        self.append((done, total))

    def check(self) -> None:
        assert [done for done, _ in self] == list(range(1, len(self) + 1))
        assert {total for _, total in self} == {len(self)}


def test_what_takes_long_tells_every_step() -> None:
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(16, 2, activation="gelu", batch_first=True).eval()
    x = torch.randn(1, 5, 16)

    def metric(output: Any) -> torch.Tensor:
        return output[:, -1, 0]

    steps, flow, warm = Steps(), Steps(), Steps()
    interpret.attribute(model, x, metric, method="integrated", steps=4, progress=steps)
    interpret.attribute(model, x, method="flow", queries=[1, 2, 4], progress=flow)
    regard.warm_up(width=8, dtype=torch.float32, device="cpu", progress=warm)
    assert (len(steps), len(flow), len(warm)) == (4, 3, 2)
    for told in (steps, flow, warm):
        told.check()


def test_compositions_tell_each_layer() -> None:
    told = Steps()
    interpret.compositions(models.load("regard-small", device="cpu").model, progress=told)
    assert len(told) == 8
    told.check()
