"""A pytest plugin that writes what became of each test, one JSON object a line.

The folder of this file is put on the path by itself: the peers have a package `tests` too.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

FILE = "REGARD_PEERS_OUTCOMES"
STRIDE = 11
"""Of more than a hundred cases of one test every so many-th runs: a prime, so that no parameter
stays the same."""


# Last, when `-k` has chosen: of what it left out none is counted.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    alike: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        file_and_class = item.nodeid.rpartition("::")[0]
        alike[file_and_class, re.split(r"\d", item.name)[0]].append(item)
    kept = {
        id(item)
        for group in alike.values()
        for item in (group[::STRIDE] if len(group) > 100 else group)
    }
    left_out = [item for item in items if id(item) not in kept]
    items[:] = [item for item in items if id(item) in kept]
    config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # The same numbers in every run, or tests would differ by chance.
    random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        error = call.excinfo
        lines = [] if error is None else error.exconly(tryshort=True).strip().splitlines()
        write(
            test=report.nodeid,
            outcome=report.outcome,
            why=" ".join(line.strip() for line in lines[:2]),
        )
    return report


def write(**noted: Any) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(noted) + "\n")
