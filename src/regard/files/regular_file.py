"""Regular files from untrusted sources, read up to a limit."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MOST_TEXT = 1 << 26
"""Bytes of a file that is still read whole."""


def opened(path: Path) -> BinaryIO:
    """A regular file, to be read. What is none, such as a pipe on which a reader would wait for
    ever, is an OSError."""
    # Opening a pipe waits for somebody to write to it, unless it is told not to.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return open(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def read_bytes(path: Path, most: int = MOST_TEXT) -> bytes:
    """The content of a regular file of at most so many bytes."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and {most} are read", str(path))
        # A file can grow while it is read.
        return file.read(most)


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """The text of a regular file. What is no text is a ValueError, as it is for `open`."""
    return read_bytes(path, most).decode("utf-8")


def read_json(path: Path, most: int = MOST_TEXT) -> dict[str, Any]:
    """The JSON object in a file. Whatever else is in it is a ValueError."""
    try:
        found = json.loads(read_text(path, most))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds a JSON {type(found).__name__}, not an object")
    return found
