"""Two processes that meet by gloo and run many cases one after another: starting them takes longer
than all of these together."""

from __future__ import annotations

import logging
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

Case = Callable[[int, Path], None]
LONG = 100
"""So many seconds all cases may take."""


def outcomes(cases: Mapping[str, Case], folder: Path) -> dict[str, list[str]]:
    """What went wrong in each case on each rank; empty if nothing did."""
    # Forked from a process that never learned, so that packages are imported once.
    context = torch.multiprocessing.get_context("forkserver")
    modules = {case.__module__ for case in cases.values()}
    context.set_forkserver_preload([__name__, *modules, "torch._dynamo"])
    ranks = [context.Process(target=_rank, args=(r, cases, folder)) for r in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LONG + 10)
        if rank.is_alive():
            rank.kill()
    return {name: [_said(folder / f"{name}.{r}") for r in (0, 1)] for name in cases}


def _said(file: Path) -> str:
    return file.read_text() if file.exists() else "was not reached, or did not end"


def _rank(rank: int, cases: Mapping[str, Case], folder: Path) -> None:
    signal.alarm(LONG)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
        timeout=timedelta(seconds=20),
    )  # fmt: skip
    # What a launcher would have told, for those who ask.
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ |= {name: str(number) for name, number in told.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, case in cases.items():
        wrong = ""
        try:
            torch.manual_seed(0)
            case(rank, folder)
        except BaseException:
            wrong = traceback.format_exc()
        (folder / f"{name}.{rank}").write_text(wrong)
        if wrong:
            # The other one may wait for this one, and would meet it in another case.
            os._exit(1)
    distributed.destroy_process_group()
