"""Files that somebody else may have written, and files that are written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from regard.errors import RegardError

MOST_TEXT = 1 << 26
"""Bytes of a file that is still read whole."""


def opened(path: Path) -> BinaryIO:
    """A regular file, to be read. What is none, such as a pipe on which a reader would wait for
    ever, is an OSError."""
    # Opening a pipe waits for somebody to write to it, unless it is told not to.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
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


def expanded(name: str) -> Path:
    """A path as people write it; ~ of a user whom nobody knows stays as it is."""
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


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[Path]:
    """A new file beside another, which it replaces when all went well, and whose permissions it
    takes. A file that replaces none has `mode`; what is usual, if that is None."""
    unfinished = None
    try:
        path = resolved(path)
        unfinished = path.with_name(f".{secrets.token_hex(8)}.part")
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        with suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.stat().st_mode)
        # Nobody else can open it before it has its permissions.
        first = 0o666 if mode is None else 0o600
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, first))
        yield unfinished
        if mode is not None:
            unfinished.chmod(mode)
        unfinished.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise RegardError(
            "the file cannot be written",
            got=f"{path}: {error.strerror or error}",
            accepted="a path in a folder that exists, can be written to and has room",
            do="choose another path; nothing was written or replaced",
        ) from None
    finally:
        if unfinished is not None:
            with suppress(OSError):
                unfinished.unlink()


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


def sync_folder(folder: Path) -> None:
    """Have a folder's names on disk: a file that was renamed is found under its name after the
    power failed."""
    with suppress(OSError):  # Not every system can open or sync a folder.
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
