"""Texts in files, found again by their number: where each line begins, and a hash of everything."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from regard.errors import RegardError
from regard.files import expanded, is_folder, opened

LINES = (".jsonl", ".ndjson")
"""Files of which each line is a JSON object with a text; of others each line is a text."""
READ = (".txt", *LINES)
"""Files that are read of a folder."""
FIELD = "text"
SHARD = 64
"""Texts in a shard, unless the number of shards is given."""


@dataclass(frozen=True)
class Source:
    """Where a text stands."""

    file: str
    line: int


class Corpus:
    """Texts by their number, from 0. Only where they begin is held in memory."""

    def __init__(self, names: Sequence[str]) -> None:
        self.files = tuple(files_of(names))
        self._file, self._line, self._start = array("l"), array("q"), array("q")
        digest = hashlib.sha256()
        for i, path in enumerate(self.files):
            digest.update(b"lines of JSON" if _is_json(path) else b"lines")
            digest.update(self._indexed(i, path))
        self.hash = digest.hexdigest()
        if not len(self):
            raise RegardError(
                "there is no text in the files",
                got=", ".join(map(str, self.files))[:200],
                accepted="a text a line, or lines of JSON with a text each (.jsonl)",
            )

    def __len__(self) -> int:
        return len(self._start)

    def shard(self, number: int, shards: int) -> range:
        """The texts of one of so many shards, about equally many in each."""
        return range(number * len(self) // shards, (number + 1) * len(self) // shards)

    def source(self, number: int) -> Source:
        return Source(str(self.files[self._file[number]]), self._line[number])

    def texts(self, numbers: Sequence[int]) -> Iterator[str]:
        """Some texts in turn."""
        for number in numbers:
            path = self.files[self._file[number]]
            try:
                with opened(path) as file:
                    file.seek(self._start[number])
                    line = file.readline()
            except OSError as error:
                raise self._unreadable(number, str(error)) from None
            yield self._text(number, line)

    def _indexed(self, i: int, path: Path) -> bytes:
        """Note where the lines of a file begin; the hash of its bytes. All are read as texts once,
        so that a bad one is reported before hours of work, not amid them."""
        digest, start = hashlib.sha256(), 0
        try:
            with opened(path) as file:
                for number, line in enumerate(file, 1):
                    digest.update(line)
                    if line.strip():
                        self._file.append(i)
                        self._line.append(number)
                        self._start.append(start)
                        self._text(len(self) - 1, line)
                    start += len(line)
        except OSError as error:
            raise RegardError(
                "the texts cannot be read",
                got=f"{path}: {error.strerror or error}",
                accepted="files of UTF-8 text, a text a line",
            ) from None
        return digest.digest()

    def _text(self, number: int, line: bytes) -> str:
        begins = self._start[number] == 0  # where other programs put a byte order mark
        try:
            said = line.decode("utf-8-sig" if begins else "utf-8").rstrip("\r\n")
            if not _is_json(self.files[self._file[number]]):
                return said
            found = json.loads(said)
            text = found[FIELD] if isinstance(found, dict) else found
            if isinstance(text, str):
                text.encode()  # JSON can name halves of characters, which no tokenizer reads
        except UnicodeError as error:
            raise self._unreadable(number, str(error)) from None
        except (ValueError, KeyError, RecursionError) as error:
            raise self._unreadable(number, f"{type(error).__name__} {error}") from None
        if not isinstance(text, str):
            raise self._unreadable(number, f"{FIELD!r} is a {type(text).__name__}")
        return text

    def _unreadable(self, number: int, why: str) -> RegardError:
        source = self.source(number)
        return RegardError(
            f"a text cannot be read: line {source.line} of {source.file}",
            got=why[:200],
            accepted=f'UTF-8; in .jsonl a JSON object with "{FIELD}", or a JSON string',
        )


def files_of(names: Sequence[str]) -> list[Path]:
    """The files that are meant by files, folders and patterns, in that order."""
    found: list[Path] = []
    for name in names:
        path = expanded(name)
        if is_folder(path):
            some = sorted(p for p in path.iterdir() if p.suffix.lower() in READ and p.is_file())
        elif any(sign in path.name for sign in "*?[") and not path.exists():
            some = sorted(p for p in path.parent.glob(path.name) if p.is_file())
        else:
            some = [path]
        if not some:
            raise RegardError(
                "there are no texts of that name",
                got=repr(name),
                accepted="a file, a pattern such as 'part-*.txt', or a folder with files that end "
                f"in {', '.join(READ)}",
            )
        found += some
    return found


def _is_json(path: Path) -> bool:
    return path.suffix.lower() in LINES


def usual_shards(texts: int) -> int:
    """The default number of shards.

    >>> usual_shards(1), usual_shards(1000)
    (1, 16)
    """
    return max(1, -(-texts // SHARD))
