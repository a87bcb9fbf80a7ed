"""Stop and Ctrl+C while the app reads: both are heard at once, and the program ends by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from regard.models import load
from regard.view.atlas import Atlas
from regard.view.web.session import Session
from tests.view.http_client import Visitor
from tests.view.small_traces import seen

LETTERS = "abcdefghij" * 40_000
WORDS = " ".join(f"word{i}" for i in range(20_000))
SERVE = """
from regard.view.web import serve
from tests.view.small_traces import seen
serve(seen(5), ready=lambda address: print(address, flush=True))
"""


class Running:
    """The app in a process of its own."""

    def __init__(self, folder: Path) -> None:
        """The browser is a script, which writes down how it was called."""
        self.called = folder / "called"
        browser = folder / "browser"
        browser.write_text(f'#!/bin/sh\necho "$@" >"{self.called}"\n')
        browser.chmod(0o700)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OMP_NUM_THREADS": "1",
                "BROWSER": str(browser),
                "TMPDIR": str(folder),
            },
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.visitor = Visitor.enter(self.address)

    def post(self, name: str, **asked: Any) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.visitor.post(name, json.dumps(asked).encode()).body)
        return told

    def end(self) -> tuple[int, str]:
        """Interrupt it, as Ctrl+C does."""
        self.process.send_signal(signal.SIGINT)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    app = Running(tmp_path)
    yield app
    app.process.kill()
    app.process.wait()


def test_an_interrupt_ends_the_app_while_it_reads(running: Running, tmp_path: Path) -> None:
    assert running.post("read", text=WORDS, model="spelling")["work"]["state"] == "running"
    time.sleep(0.5)
    assert running.post("stop")["refused"] == ""
    until = time.monotonic() + 5
    while running.post("stop")["work"]["state"] != "stopped":
        assert time.monotonic() < until, "Stop is heard"
        time.sleep(0.05)
    assert not running.post("read", text=WORDS, model="spelling")["refused"]
    time.sleep(0.5)
    code, said = running.end()
    assert code in (0, 130), said
    assert "Traceback" not in said
    assert "terminate" not in said
    # No command line told the secret, and the file that did is gone.
    secret = urlsplit(running.address).path.strip("/")
    called = running.called.read_text()
    assert called.startswith(f"file://{tmp_path}/regard-")
    assert secret not in called
    assert not list(tmp_path.glob("regard-*"))


@pytest.mark.parametrize(
    ("text", "model"),
    [(LETTERS, "regard-small"), (LETTERS, "spelling"), (WORDS, "spelling")],
    ids=["letters", "spelled letters", "words"],
)
def test_reading_is_stopped_within_a_second(text: str, model: str) -> None:
    on = Session(Atlas.of(seen(5)))
    opening = 0.0
    if model != "spelling":
        # Opening a model cannot be stopped; the second time it takes no longer than the first.
        began = time.monotonic()
        load(model)
        opening = time.monotonic() - began
    # Spelling is quick: long enough for quick machines.
    on.read({"text": text * (4 if model == "spelling" else 1), "model": model, "tokens": 0})
    time.sleep(0.05 + opening)
    on.work.stop()
    began = time.monotonic()
    on.work.wait(10)
    state = on.work.state()["state"]
    assert state == "stopped" or (state == "failed" and model == "regard-small"), state
    # A second, but for machines that do more than this.
    assert time.monotonic() - began < 5.0
