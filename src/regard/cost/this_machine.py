"""This machine as a device: how fast its matrix products and copies really are.

Measured once and kept in the user's cache folder; `regard.cost.device("here")` reads it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from regard.cost.rates import Device
from regard.errors import RegardError
from regard.files import read_json, replacing

SIDE = {"cpu": 2048, "cuda": 8192}
COPIED = {"cpu": 1 << 28, "cuda": 1 << 31}
"""Bytes of the tensor that is copied: more than any cache holds."""
SECONDS = 1.0
"""How long each thing is repeated. The best time counts: others may use the machine too."""
ELSEWHERE = "let XDG_CACHE_HOME name a folder that can be written"

Progress = Callable[[str], None]


def measure(where: str | None = None, *, progress: Progress | None = None) -> Device:
    """Measure this machine: its GPU where PyTorch finds one, else its CPU."""
    kind = where or ("cuda" if torch.cuda.is_available() else "cpu")
    rates = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        if progress is not None:
            progress(f"matrix products in {name}")
        rates[name] = _product_rate(dtype, kind)
    if progress is not None:
        progress("copies")
    source = torch.ones(COPIED.get(kind, 1 << 30), dtype=torch.uint8, device=kind)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / _best(partial(target.copy_, source), kind)
    return Device("this machine", rates, bandwidth, _memory(kind), _called(kind))


def keep(found: Device) -> Path:
    """Store a measured device as "here"."""
    path = _path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RegardError(
            "what was measured cannot be kept", got=f"{path}: {error.strerror}", do=ELSEWHERE
        ) from None
    with replacing(path, do=ELSEWHERE) as part:
        part.write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    return path


def here() -> Device:
    """This machine, as it was measured."""
    path = _path()
    if not path.exists():
        raise RegardError("this machine was not measured yet", do="run: regard doctor --measure")
    try:
        found = read_json(path)
        rates = {str(dtype): float(rate) for dtype, rate in found["rates"].items()}
        bandwidth = float(found["bandwidth"])
        memory = None if found["memory"] is None else float(found["memory"])
        if not (rates and bandwidth > 0 and all(rate > 0 for rate in rates.values())):
            raise ValueError("rates must be above 0")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RegardError(
            "what was measured of this machine cannot be read",
            got=f"{path}: {error}",
            do="measure again: regard doctor --measure",
        ) from None
    return Device(str(found["name"]), rates, bandwidth, memory, str(found.get("about", "")))


def _product_rate(dtype: torch.dtype, kind: str) -> float:
    """FLOPs a second. A CPU without instructions for a type would take minutes for the largest
    matrices: there they are as large as one product in the time to measure allows.
    """
    largest = SIDE.get(kind, 4096)
    side = min(256, largest) if kind == "cpu" else largest
    while True:
        a, b, out = (torch.zeros(side, side, dtype=dtype, device=kind) for _ in range(3))
        product = partial(torch.mm, a, b, out=out)
        if side < largest:
            product()
            if 8 * _took(product, kind) < SECONDS:
                side = min(2 * side, largest)
                continue
        return 2 * side**3 / _best(product, kind)


def _best(run: Callable[[], object], kind: str) -> float:
    """The shortest of many times, in seconds."""
    best, spent = float("inf"), 0.0
    run()
    while spent < SECONDS:
        took = _took(run, kind)
        best, spent = min(best, took), spent + took
    return best


def _took(run: Callable[[], object], kind: str) -> float:
    _wait(kind)
    start = time.perf_counter()
    run()
    _wait(kind)
    return time.perf_counter() - start


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def _called(kind: str) -> str:
    if kind == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{processor()}, {torch.get_num_threads()} threads"


def processor() -> str:
    """The name of this machine's processor where the system tells it, else its kind."""
    names = Path("/proc/cpuinfo")
    lines = names.read_text("utf-8", "replace").splitlines() if names.exists() else []
    told = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return told[0] if told else platform.machine()


def _memory(kind: str) -> float | None:
    if kind == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    known = {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= os.sysconf_names.keys()
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) if known else None


def _path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or "~/.cache").expanduser() / "regard" / "here.json"
    except RuntimeError:
        raise RegardError(
            "there is no home folder to keep what is measured in",
            do=ELSEWHERE,
        ) from None
