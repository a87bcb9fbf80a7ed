"""Programs in processes that have imported nothing but torch, which takes most of the time that
starting one takes: each is a fork of a process that has imported it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

_SERVER = """
import json, os, signal, sys, traceback, torch

for line in sys.stdin:
    asked, *given = json.loads(line)
    if asked == "wait":
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(*given, 0)[1])), flush=True)
        continue
    program, *said = given
    child = os.fork()
    if not child:
        # A shell's background jobs, and all they start, are deaf to Ctrl+C, and those of nohup to
        # a terminal that is closed; this one is not to be.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        for path, number in zip(said, (1, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        code = 0
        try:
            exec(program, {"__name__": "__main__"})
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(json.dumps(child), flush=True)
"""


class Ended(NamedTuple):
    """A program that has ended, as its caller sees it."""

    code: int
    out: str
    err: str


class Started:
    """A program that runs."""

    def __init__(self, server: FreshProcesses, pid: int, out: Path, err: Path) -> None:
        self._server, self._pid, self._out, self._err = server, pid, out, err

    @property
    def out(self) -> str:
        """What it has said so far."""
        return self._out.read_text() if self._out.exists() else ""

    def send_signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def wait(self) -> Ended:
        code = self._server.ask("wait", self._pid)
        return Ended(code, self._out.read_text(), self._err.read_text())


class FreshProcesses:
    """Starts them, with other variables of the environment where some are given."""

    def __init__(self, **variables: str) -> None:
        command = [sys.executable, "-W", "ignore", "-c", _SERVER]
        # Strings have other hashes there than here.
        salt = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        environment = os.environ | {"PYTHONHASHSEED": salt} | variables
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = count()

    def start(self, program: str) -> Started:
        number = next(self._numbers)
        said = [Path(self._folder.name) / f"{number}.{name}" for name in ("out", "err")]
        return Started(self, self.ask("start", program, *map(str, said)), *said)

    def __call__(self, program: str) -> Ended:
        return self.start(program).wait()

    def ask(self, *request: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def __enter__(self) -> FreshProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.communicate()
        self._folder.cleanup()
