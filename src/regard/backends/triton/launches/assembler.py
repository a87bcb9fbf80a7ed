"""Which assembler makes a kernel's binary: one that sets every register it reads.

ptxas 12.8, which Triton 3.5 and 3.6 bring, has a fault: some kernels with Hopper's products read a
uniform register that nothing has set, as the address of an operand. For causal heads of 24 over
values of 10 in half precision, one launch in some hundred ended in an illegal memory access. The
same PTX assembled by 12.9 is right, and as quick in all that was measured.

Triton 3.6 brings 12.9 too, for GPUs after Hopper. With Triton 3.5, which does not, calls like those
that failed are refused (`refusals.py`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from triton import knobs
from triton.runtime import driver

SOUND = (12, 9)
"""The first version without the fault."""
HOPPER = 90
_KEY = {"ptx_options": "--opt-level 3"}
"""The assembler's default, said: Triton finds binaries of another assembler under the same key, but
not under other options."""


class _Path(str):
    """A path that Triton does not write to the environment, as it does with strings."""


class _Inside:
    """How many threads compile with another assembler, and what was set before the first."""

    lock = threading.Lock()
    threads = 0
    before: Any = None


def better() -> str | None:
    """The path of an assembler without the fault, where the one that Triton would take has it."""
    if not _faulty(knobs.nvidia.ptxas.version):
        return None
    other = getattr(knobs.nvidia, "ptxas_blackwell", None)
    return None if other is None or _faulty(other.version) else str(other.path)


@cache
def is_faulty() -> bool:
    """Whether Triton has no assembler without the fault."""
    return _faulty(knobs.nvidia.ptxas.version) and better() is None


@contextmanager
def without_faults() -> Iterator[dict[str, Any]]:
    """Compile inside, with these options more, and Triton assembles without the fault, if it has
    the means. Its setting is one for all threads: it is put back after the last."""
    options = _enter()
    try:
        yield options
    finally:
        if options:
            _leave()


def _enter() -> dict[str, Any]:
    with _Inside.lock:
        if not _Inside.threads:
            path = better() if _on_hopper() else None
            if path is None:
                return {}
            _Inside.before = vars(knobs.nvidia).get("ptxas")
            knobs.nvidia.ptxas = _Path(path)
        _Inside.threads += 1
    return _KEY


def _leave() -> None:
    with _Inside.lock:
        _Inside.threads -= 1
        if not _Inside.threads:
            del knobs.nvidia.ptxas
            if _Inside.before is not None:
                vars(knobs.nvidia)["ptxas"] = _Inside.before


def _on_hopper() -> bool:
    try:
        return bool(driver.active.get_current_target().arch == HOPPER)
    except RuntimeError:
        # Triton finds no GPU.
        return False


def _faulty(version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < SOUND
