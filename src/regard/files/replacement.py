"""Files that are written whole or not at all: a new file replaces the old one when it is whole."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from regard.errors import RegardError
from regard.files.paths import resolved


@contextmanager
def replacing(
    path: Path, mode: int | None = None, *, do: str = "choose another path"
) -> Iterator[Path]:
    """A new file beside another, which it replaces when all went well, and whose permissions it
    takes. A file that replaces none has `mode`; what is usual, if that is None. `do` is what the
    error advises where the file cannot be written."""
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
            do=f"{do}; nothing was written or replaced",
        ) from None
    finally:
        if unfinished is not None:
            with suppress(OSError):
                unfinished.unlink()


def sync_folder(folder: Path) -> None:
    """Have a folder's names on disk: a file that was renamed is found under its name after the
    power failed."""
    with suppress(OSError):  # Not every system can open or sync a folder.
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
