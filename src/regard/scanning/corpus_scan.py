"""A scan from beginning to end: shards are read by whoever takes part, and merged in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from regard.errors import RegardError
from regard.files import claimed
from regard.scanning import result_files
from regard.scanning.options import Options
from regard.scanning.ranks import Ranks
from regard.scanning.scan_table import Scan
from regard.scanning.scanner import Job, Scanner
from regard.scanning.settings import settle
from regard.scanning.states import State

Progress = Callable[[int, int, int], None]
"""Called with the number of texts done, of all texts, and of tokens read in this run."""


def scan(job: Job, *, progress: Progress | None = None, timeout: float = 600.0) -> Scan | None:
    """Read a corpus, and write what every head did into a folder.

    Shards whose files are there and whole are not read again: whatever ended a scan, the same call
    goes on with it. Under torchrun every rank calls this, and rank 0 gives the result; the others
    give None when there is nothing left to read. `timeout` is how many seconds may pass without any
    rank having read anything.
    """
    ranks = Ranks.from_environment(timeout)
    if ranks is None:
        return _alone(job, progress)
    with ranks.together():
        return _among(job, ranks, progress)


def _alone(job: Job, progress: Progress | None) -> Scan:
    scanner = job.open()
    with claimed_folder(scanner.folder):
        settle(scanner.folder, scanner.settings)
        done = Done(scanner, progress)
        for shard in range(scanner.shards):
            if scanner.found(shard) is None:
                scanner.scan_shard(shard, done.read)
            else:
                done.skip(shard)
        return merge(scanner)


def _among(job: Job, ranks: Ranks, progress: Progress | None) -> Scan | None:
    scanner = replace(job, device=ranks.device(job.device)).open()
    first = ranks.rank == 0
    with ExitStack() as held:
        if first:
            held.enter_context(claimed_folder(scanner.folder))
            settle(scanner.folder, scanner.settings)
            ranks.post("settled")
        else:
            ranks.wait_for("settled")
            settle(scanner.folder, scanner.settings)
        done = Done(scanner, progress, ranks.beat)
        for shard in ranks.shards(scanner.shards):
            if scanner.found(shard) is None:
                scanner.scan_shard(shard, done.read)
            else:
                done.skip(shard)
        ranks.post("done")
        if not first:
            return None
        ranks.wait_for_all("done", lambda: done.read(0, 0))
        return merge(scanner)


class Done:
    """How much was read: here, or by all ranks together."""

    def __init__(
        self,
        scanner: Scanner,
        progress: Progress | None,
        beat: Callable[[int, int], tuple[int, int]] | None = None,
    ) -> None:
        self.scanner, self.progress, self.beat = scanner, progress, beat
        self.texts = self.tokens = 0

    def read(self, texts: int, tokens: int) -> None:
        if self.beat is None:
            self.texts, self.tokens = self.texts + texts, self.tokens + tokens
        else:
            self.texts, self.tokens = self.beat(texts, tokens)
        if self.progress is not None:
            total = len(self.scanner.corpus)
            self.progress(min(self.texts, total), total, self.tokens)

    def skip(self, shard: int) -> None:
        """A shard that was there."""
        self.read(len(self.scanner.corpus.shard(shard, self.scanner.shards)), 0)


def merge(scanner: Scanner) -> Scan:
    """All shards in their order, and the tables that come of them."""
    total = State({})
    for shard in range(scanner.shards):
        found = scanner.found(shard)
        if found is None:
            raise RegardError(
                "a shard is missing or not whole",
                got=str(scanner.path(shard)),
                do="run the same command again: it is made anew, and the others are kept",
            )
        total = total.merged(found)
    for left in scanner.folder.rglob(".*.part"):
        # Of a process that was killed while it wrote.
        left.unlink(missing_ok=True)
    scan = Scan.of(total, scanner.options.statistics)
    result_files.write(scan, scanner)
    return scan


@contextmanager
def claimed_folder(folder: Path) -> Iterator[None]:
    """Nobody else scans into a folder meanwhile."""
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(claimed(folder))
        except OSError as error:
            raise RegardError(
                "the folder cannot be written to", got=f"{folder}: {error.strerror or error}"
            ) from None
        yield


__all__ = ["Job", "Options", "Scan", "scan"]
