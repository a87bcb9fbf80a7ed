"""Several ranks on one machine, started once for many cases."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Case = Callable[[], Any]
Cases = Callable[[], dict[str, Case]]
Found = dict[str, list[Any]]
"""For each case what each rank says: None, or what went wrong."""

WAIT = timedelta(seconds=60)


def run(cases: Cases, ranks: int, *, joined: bool = True, seconds: float = 240) -> Found:
    """Every case on every rank, one after the other; unless `joined`, they find each other."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Processes that are forked from one that never learned may learn, and import nothing anew.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.parallel.cases", "torch._dynamo"])
    told = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'ranks'}" if joined else None
        started = [
            context.Process(target=_rank, args=(cases, meeting, r, ranks, told), daemon=True)
            for r in range(ranks)
        ]
        for process in started:
            process.start()
        try:
            found = _collected(told, ranks, time.monotonic() + seconds)
        finally:
            for process in started:
                process.join(5)
                process.kill()
    names = dict.fromkeys(name for each in found.values() for name in each)
    return {
        name: [found.get(r, {}).get(name, "no word from this rank") for r in range(ranks)]
        for name in names
    }


def _collected(told: Any, ranks: int, until: float) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    while len(found) < ranks and time.monotonic() < until:
        try:
            rank, results = told.get(timeout=max(0.1, until - time.monotonic()))
        except queue.Empty:
            break
        found[rank] = results
    assert found, "no rank said anything in time"
    return found


def _rank(cases: Cases, meeting: str | None, rank: int, ranks: int, told: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    results: dict[str, Any] = {}
    name = "start"
    try:
        if meeting is not None:
            dist.init_process_group(
                "gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=WAIT
            )
        for name, case in cases().items():
            results[name] = case()
    except BaseException:
        # Others may wait for what this rank did not come to: all stop here.
        results[name] = traceback.format_exc()
    told.put((rank, results))
    told.close()
    told.join_thread()
    os._exit(0)
