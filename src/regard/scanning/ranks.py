"""The ranks of torchrun, which share out shards and report failures to one another.

There is no process group: a key-value store is enough, since nothing is exchanged but who does
what. So a restart has no connections to find again, and a failure is named by the rank that had it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from regard.errors import RegardError

PAUSE = 0.05
AGAIN = "run the same command again: shards that are whole are kept"


class Ranks:
    """This rank, and how many there are."""

    def __init__(self, rank: int, world: int, store: Store, timeout: float) -> None:
        self.rank, self.world, self.store, self.timeout = rank, world, store, timeout

    @staticmethod
    def from_environment(timeout: float) -> Ranks | None:
        """As torchrun says it; None where this process is alone."""
        world = _number("WORLD_SIZE", 1)
        if world == 1:
            return None
        rank, host = _number("RANK"), os.environ.get("MASTER_ADDR", "localhost")
        # torchrun keeps the store itself.
        keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = TCPStore(
                host, _number("MASTER_PORT"), world, keeps,
                timedelta(seconds=timeout), wait_for_workers=False,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise RegardError(
                "the ranks cannot connect to each other",
                got=f"rank {rank} of {world} at {host}: {str(error).splitlines()[0]}",
                do="start them with torchrun",
            ) from None
        # What a run left in the store that was restarted is not for this one.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Ranks(rank, world, PrefixStore(f"regard.scan/{attempt}", store), timeout)

    def device(self, asked: str) -> str:
        """The device of this rank: each has a card of its own."""
        if asked in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{_number('LOCAL_RANK', 0) % torch.cuda.device_count()}"
        return asked

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around the work of a rank: if it fails, the others learn why."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankError):
                why = str(error) if isinstance(error, RegardError) else repr(error)
                with suppress(Exception):
                    self.store.compare_set("failed", "", f"rank {self.rank}: {why}")
            raise

    def shards(self, many: int) -> Iterator[int]:
        """Shards that no other rank has taken, until one fails."""
        while True:
            self._check()
            shard = self.store.add("next", 1) - 1
            if shard >= many:
                return
            self.store.set(f"at/{self.rank}", str(shard))
            yield shard

    def beat(self, texts: int, tokens: int) -> tuple[int, int]:
        """Tell the others of texts and tokens that were read; how many all have."""
        return self.store.add("texts", texts), self.store.add("tokens", tokens)

    def post(self, word: str) -> None:
        self.store.set(f"{word}/{self.rank}", "1")

    def wait_for(self, word: str) -> None:
        """Until rank 0 has said a word."""
        self._wait(lambda: [] if self._posted(word, 0) else [0], word, lambda: None)

    def wait_for_all(self, word: str, meanwhile: Callable[[], None]) -> None:
        """Until every rank has said a word."""
        left = set(range(self.world))

        def missing() -> list[int]:
            left.difference_update([rank for rank in left if self._posted(word, rank)])
            return sorted(left)

        self._wait(missing, word, meanwhile)

    def _wait(
        self, missing: Callable[[], list[int]], word: str, meanwhile: Callable[[], None]
    ) -> None:
        before, since = -1, time.monotonic()
        while left := missing():
            self._check()
            meanwhile()
            read = self.store.add("tokens", 0)
            if read != before:
                before, since = read, time.monotonic()
            if time.monotonic() - since > self.timeout:
                raise RankError(
                    f"no rank has read anything for {self.timeout:g} seconds",
                    got="; ".join(f"rank {rank} is not {word}{self._at(rank)}" for rank in left),
                    do=AGAIN,
                )
            time.sleep(PAUSE)

    def _posted(self, word: str, rank: int) -> bool:
        return bool(self.store.check([f"{word}/{rank}"]))

    def _at(self, rank: int) -> str:
        known = self.store.check([f"at/{rank}"])
        return f", at shard {self.store.get(f'at/{rank}').decode()}" if known else ""

    def _check(self) -> None:
        """End with the others if one of them has failed."""
        try:
            failed = self.store.check(["failed"]) and self.store.get("failed").decode()
        except RuntimeError as error:
            raise RankError(
                "the ranks lost their connection",
                got=f"rank {self.rank}: {str(error).splitlines()[0]}",
                do=AGAIN,
            ) from None
        if failed:
            raise RankError("another rank failed, and with it the scan", got=failed, do=AGAIN)


class RankError(RegardError):
    """Another rank's failure, as this one learns of it."""


def _number(name: str, usual: int | None = None) -> int:
    found = os.environ.get(name)
    if found is None and usual is not None:
        return usual
    try:
        return int(found or "")
    except ValueError:
        raise RegardError(
            f"the environment variable {name} is missing, or not a number",
            got=repr(found),
            do="start the ranks with torchrun, which sets it",
        ) from None
