"""What a target of fuzzing is, and which there are."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import tests.fuzz

Case = Callable[[Random, Path], str]
"""Makes one hostile input in an empty folder, gives it to regard, and tells the outcome in a word.
A RegardError may leave it; any other exception is a finding."""


@dataclass(frozen=True)
class Target:
    """A kind of input. `prepare` is called once, with a folder that stays, and gives the cases."""

    name: str
    prepare: Callable[[Path], Case]
    seconds: float = 10.0
    """How long one case may take."""
    share: int = 1
    """How many of its cases there are to one of another target's."""


def targets() -> list[Target]:
    """Those of all files here that have one."""
    names = sorted(m.name for m in pkgutil.iter_modules(tests.fuzz.__path__))
    found = (importlib.import_module(f"tests.fuzz.{name}") for name in names if _holds(name))
    return [module.target for module in found if hasattr(module, "target")]


def _holds(name: str) -> bool:
    return name not in ("__main__", "targets", "running") and not name.startswith("test_")
