"""Programs in processes that have imported nothing but torch, which takes most of the time that
starting one takes: each is a fork of a process that has imported it."""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import NamedTuple

_SERVER = """
import json, os, sys, tempfile, traceback, torch

for line in sys.stdin:
    said = [tempfile.TemporaryFile("w+") for _ in range(2)]
    child = os.fork()
    if not child:
        for file, number in zip(said, (1, 2)):
            os.dup2(file.fileno(), number)
        code = 0
        try:
            exec(json.loads(line), {"__name__": "__main__"})
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in said:
        file.seek(0)
    print(json.dumps([code, *(file.read() for file in said)]), flush=True)
"""


class Ended(NamedTuple):
    """A program that has ended, as its caller sees it."""

    code: int
    out: str
    err: str


class FreshProcesses:
    """Starts them, one after another."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-c", _SERVER]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, program: str) -> Ended:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(program) + "\n")
        self._server.stdin.flush()
        return Ended(*json.loads(self._server.stdout.readline()))

    def __enter__(self) -> FreshProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.communicate()
