"""The C functions as a library: built once with this machine's C compiler, and kept.

It lies in the user's cache folder under a name that changes with the sources, the compiler, its
options and the CPU, so what is found there fits, and is built anew when anything changes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from regard.files import read_bytes
from regard.notices import notice

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared")


class UnavailableError(Exception):
    """Why there is no compiled library, in plain words."""


def library() -> ctypes.CDLL:
    """The library from the cache, or freshly built."""
    if sys.platform != "linux":
        raise UnavailableError("the compiled one is built on Linux only")
    command = [*_compiler(), *FLAGS]
    folder, key = _folder(), _key(command)
    for path in sorted(folder.glob(f"tile-{key}-*.so")):
        # Loading a damaged library can end the process, so its name also tells its contents. What
        # is no file, or cannot be read, is none of ours.
        with suppress(OSError):
            if path.name == _name(key, path):
                return _load(path)
    return _load(_built(command, folder, key))


def _compiler() -> list[str]:
    asked = os.environ.get("CC", "").strip()
    for command in [asked] if asked else ["cc", "gcc", "clang"]:
        try:
            program, *options = shlex.split(command)
        except ValueError as error:
            raise UnavailableError(f"CC={asked} cannot be read: {error}") from None
        path = shutil.which(program)
        if path is not None:
            return [path, *options]
    raise UnavailableError(
        f"the C compiler CC={asked} was not found" if asked else "no C compiler was found"
    )


def _folder() -> Path:
    # By its specification a path that is not absolute does not count.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = (base if base.is_absolute() else Path("~/.cache").expanduser()) / "regard"
    except RuntimeError:
        raise UnavailableError("there is no home folder to keep it in") from None
    if not folder.is_absolute():
        raise UnavailableError(f"the home folder is no absolute path: {folder}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError as error:
        raise UnavailableError(
            f"the cache folder {folder} cannot be made: {error.strerror}"
        ) from None
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise UnavailableError(f"others can write to the cache folder {folder}")
    return folder


def _key(command: list[str]) -> str:
    try:
        program = Path(command[0]).resolve().stat()
        what = [*command, program.st_size, program.st_mtime_ns, *_cpu()]
        sources = sorted(SOURCES.iterdir())
        what += [path.read_text("utf-8") for path in sources if path.suffix in (".c", ".h")]
    except (OSError, RuntimeError) as error:
        raise UnavailableError(f"what it depends on is not known: {error}") from None
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def _cpu() -> list[str]:
    """What -march=native depends on."""
    first = Path("/proc/cpuinfo").read_text("utf-8", "replace").split("\n\n", 1)[0].splitlines()
    known = ("vendor", "cpu family", "model", "stepping", "flags", "CPU ", "Features")
    return [platform.machine(), *(line for line in first if line.startswith(known))]


def _name(key: str, path: Path) -> str:
    return f"tile-{key}-{hashlib.sha256(read_bytes(path)).hexdigest()[:16]}.so"


def _built(command: list[str], folder: Path, key: str) -> Path:
    try:
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
    except OSError as error:
        raise UnavailableError(
            f"the cache folder {folder} cannot be written: {error.strerror}"
        ) from None
    os.close(handle)
    path = Path(name)
    notice("building its loop in C for this CPU, once: some seconds")
    try:
        sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
        done = subprocess.run(
            [*command, "-o", name, *sources, "-lm"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", timeout=120,
        )  # fmt: skip
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise UnavailableError(f"the C compiler {command[0]} failed: {said[0]}")
        # Renaming is atomic: other processes see the whole library or none.
        return path.rename(folder / _name(key, path))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"the C compiler {command[0]} failed: {error}") from None
    finally:
        path.unlink(missing_ok=True)


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"the compiled library cannot be loaded: {error}") from None
