"""Files that take long to write have one writer at a time, which works in a folder beside the file.

The folder is named for the file, and the writer holds a lock in it, which the system releases
however the process ends. So a second writer is refused, and what a killed writer left is found and
removed by the next.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from regard.errors import RegardError, RegardWarning
from regard.files.paths import resolved
from regard.visible import visible

try:
    import fcntl
except ImportError:  # There are no such locks on Windows.
    fcntl = None  # type: ignore[assignment]

LONGEST = 200
LOCK = "lock"

_held: dict[Path, int] = {}
"""What this process writes, and in which thread: whoever has claimed a file may do so again."""
_guard = threading.Lock()


def folder_of(path: Path) -> Path:
    """Where the parts of a file are while it is written.

    >>> folder_of(Path("runs/cat.regard")).as_posix()
    'runs/.cat.regard.parts'
    """
    name = path.name
    if len(os.fsencode(name)) > LONGEST:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return path.with_name(f".{name}.parts")


@contextmanager
def claimed(path: Path) -> Iterator[Path]:
    """A folder for the parts of a file, with the lock held; removed afterwards."""
    path = resolved(path)
    me = threading.get_ident()
    with _guard:
        mine = _held.get(path) == me
        if not mine:
            handle = _taken(path)
            _held[path] = me
    if mine:
        yield folder_of(path)
        return
    try:
        yield folder_of(path)
    finally:
        with _guard:
            del _held[path]
            # The lock goes last: who waits for the folder finds it gone.
            shutil.rmtree(folder_of(path), ignore_errors=True)
            os.close(handle)


def _taken(path: Path) -> int:
    """The lock of a file, and its folder with nothing in it."""
    folder = folder_of(path)
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or _foreign(about):
            raise FileExistsError(f"{folder} is there, and is not a folder that regard made")
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat((folder / LOCK).stat(), os.fstat(handle)):
                break
        except BlockingIOError:
            os.close(handle)
            raise RegardError(
                "another process or thread is writing this file",
                got=str(path),
                do="wait until that is done, or choose another name",
            ) from None
        except FileNotFoundError:
            pass  # It was removed in between, by whoever was done with it.
        os.close(handle)
    left = [entry for entry in folder.iterdir() if entry.name != LOCK]
    if left:
        size = sum(entry.lstat().st_size for entry in left)
        for entry in left:
            entry.unlink()
        warnings.warn(
            f"the last recording of {visible(str(path))} was broken off before it was whole; the "
            f"{size / 2**20:.1f} MiB it left are removed",
            RegardWarning,
            stacklevel=5,
        )
    return handle


def _foreign(about: os.stat_result) -> bool:
    return hasattr(os, "geteuid") and about.st_uid != os.geteuid()
