"""What processes do that read a corpus together, or are killed while they do. They are forked from
one that has no threads: a fork of a process that has some may wait forever for what they held."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from regard.scanning import Job, Scanner, scan
from regard.trace_files.tensor_file import Draft


def started(work: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that does something and ends."""
    context = multiprocessing.get_context("forkserver")
    # What torch would import at the first call, and in each process anew, takes ten times the scan.
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    process = context.Process(target=_ended, args=(work, *args), daemon=True)
    process.start()
    return process


def _ended(work: Callable[..., None], *args: Any) -> None:
    try:
        work(*args)
        os._exit(0)
    except BaseException as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)


def alone(job: Job) -> None:
    """Scan in a process of its own, as the command does: what a process did before may settle how
    the libraries that it has loaded multiply matrices."""
    process = started(_scanned, job)
    process.join(120)
    assert process.exitcode == 0


def _scanned(job: Job) -> None:
    assert scan(job) is not None


def killed(job: Job) -> None:
    """Scan, and be killed while the third file is written."""
    write, times = Draft.write, 0

    def dying(draft: Draft, file: Any, *how: Any) -> None:
        nonlocal times
        times += 1
        if times == 3:
            file.write(b"half of a file")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        write(draft, file, *how)

    Draft.write = dying  # type: ignore[method-assign]
    scan(job)


def rank(job: Job, number: int, port: str, harm: str, timeout: float, said: Path) -> None:
    """One of two ranks, of which the second does harm."""
    os.environ |= {
        "RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    sys.stderr = said.with_suffix(f".{number}").open("w")
    read, begun = Scanner._read, said.with_suffix(".begun")

    def patient(scanner: Scanner, shard: int, beat: Any) -> Any:
        # The first could do it all before the second is there.
        while not begun.exists():
            time.sleep(0.01)
        return read(scanner, shard, beat)

    def harmed(scanner: Scanner, shard: int, beat: Any) -> Any:
        begun.touch()
        if harm == "fails":
            raise RuntimeError("a card fell off the bus")
        if harm == "hangs":
            time.sleep(30)
        return read(scanner, shard, beat)

    Scanner._read = harmed if number else patient  # type: ignore[method-assign]
    found = scan(job, timeout=timeout)
    assert (found is None) == bool(number)
