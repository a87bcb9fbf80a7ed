"""Ranks share the work: the same bytes, and a failure that is named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from regard.scanning import Job
from tests.scanning.children import alone, rank, started
from tests.scanning.conftest import everything, unlike

SOURCE = Path(__file__).parents[2] / "src"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def as_ranks(job: Job, harm: str, timeout: float, said: Path) -> list[int | None]:
    """Two ranks, of which the second does harm; how the first, and, where it does none, the second
    ended."""
    port = str(free_port())
    first, second = (started(rank, job, i, port, harm, timeout, said) for i in range(2))
    first.join(timeout + 60)
    if harm:
        second.kill()
    second.join(timeout + 60)
    return [first.exitcode] if harm else [first.exitcode, second.exitcode]


def test_two_ranks_give_the_same_bytes(job: Job, tmp_path: Path) -> None:
    one = replace(job, folder=str(tmp_path / "one"))
    alone(one)
    assert as_ranks(job, "", 20.0, tmp_path / "said") == [0, 0]
    assert unlike(job.folder, one.folder) == []


@pytest.mark.parametrize(
    ("harm", "timeout", "says"),
    [
        ("fails", 20.0, ["another rank failed", "rank 1: RuntimeError('a card fell off the bus')"]),
        ("hangs", 3.0, ["no rank has read anything for 3 seconds", "rank 1 is not done, at shard"]),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_the_scan(
    job: Job, tmp_path: Path, harm: str, timeout: float, says: list[str]
) -> None:
    assert as_ranks(job, harm, timeout, tmp_path / "said") == [1]
    said = (tmp_path / "said.0").read_text()
    for part in says:
        assert part in said
    assert "run the same command again" in said
    left = everything(job.folder)
    assert not {"heads.jsonl", "extremes.jsonl", "scan.json"} & left.keys()
    # What was whole is kept, and the rest is read by whoever is there.
    whole = replace(job, folder=str(tmp_path / "whole"))
    alone(whole)
    alone(job)
    assert unlike(job.folder, whole.folder) == []


@pytest.mark.real
def test_torchrun_restarts_after_a_kill_and_gives_the_same_bytes(job: Job, tmp_path: Path) -> None:
    one = replace(job, folder=str(tmp_path / "one"))
    alone(one)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal\n"
        "from regard.scanning import Job, Options, scan\n"
        "from regard.trace_files.tensor_file import Draft\n"
        "write, written = Draft.write, []\n"
        "def dying(*how):\n"
        "    written.append(how)\n"
        "    if len(written) == 2 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(*how)\n"
        "Draft.write = dying\n"
        f"print(scan({job!r}, timeout=60))\n"
    )
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1",
            "--nproc-per-node", "2", str(program),
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "-9" in done.stderr
    assert unlike(job.folder, one.folder) == []
