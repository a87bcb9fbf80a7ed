"""Paths as people write them, and where they lead."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def expanded(name: str) -> Path:
    """A path as people write it; ~ of an unknown user stays as it is."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def is_there(path: Path) -> bool:
    """Whether there is anything of that name; False also for what cannot be a path at all."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; False also for what cannot be a path at all."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def resolved(path: Path) -> Path:
    """Where a path leads. A circle of links is an OSError (Python before 3.13 says it in another
    way)."""
    try:
        found = path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    if found.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return found
