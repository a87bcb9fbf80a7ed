"""Shards read by actors of Ray: a pool over their numbers, with our own files to go on from."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.scanning.corpus_scan import Done, Progress, claimed_folder, merge
from regard.scanning.scan_table import Scan
from regard.scanning.scanner import Job, Scanner
from regard.scanning.settings import settle

RESTARTS = 4
"""How often an actor that died is made anew, and its shard given to it again."""


class Reading:
    """What an actor holds: the model and the corpus, opened once."""

    def __init__(self, job: Job, settings: str) -> None:
        self.scanner: Scanner = job.open()
        if self.scanner.hash != settings:
            # Says what differs from what the scan was begun with.
            settle(self.scanner.folder, self.scanner.settings)

    def read(self, shard: int) -> tuple[int, int]:
        """Make the file of a shard; how many texts and tokens were read for it."""
        texts = tokens = 0

        def count(some: int, more: int) -> None:
            nonlocal texts, tokens
            texts, tokens = texts + some, tokens + more

        self.scanner.scan_shard(shard, count)
        return texts, tokens


def scan_on_ray(
    job: Job, actors: int, *, progress: Progress | None = None, gpus: float | None = None
) -> Scan:
    """The same as `scan`, by so many actors of a cluster that is there, or of this machine.

    Every machine of the cluster has to see the model, the texts and the folder by the same paths.
    """
    if find_spec("ray") is None:
        raise RegardError("Ray is not installed", do="pip install 'regard[ray]'")
    if actors < 1:
        raise RegardError("actors are counted", got=str(actors), accepted="1 or more")
    # Imported late: Ray is an extra, and takes its time.
    import ray
    from ray.util import ActorPool

    # Actors have other working directories.
    paths = tuple(str(Path(name).expanduser().absolute()) for name in job.texts)
    folder = Path(job.folder).expanduser().absolute()
    named = Path(job.model).expanduser()
    model = str(named.absolute()) if named.is_dir() else job.model
    job = replace(job, texts=paths, folder=str(folder), model=model)
    scanner = job.open()
    # Every process adds numbers up alike, whatever Ray sets for its own.
    job = replace(job, options=replace(job.options, threads=scanner.threads))
    on_card = scanner.settings.values["device"] == "cuda"
    with claimed_folder(folder):
        settle(folder, scanner.settings)
        done = Done(scanner, progress)
        missing = []
        for shard in range(scanner.shards):
            if scanner.found(shard) is None:
                missing.append(shard)
            else:
                done.skip(shard)
        if missing:
            if not ray.is_initialized():
                ray.init(log_to_driver=False)
            made: Any = ray.remote(
                num_cpus=1, num_gpus=gpus if gpus is not None else float(on_card),
                max_restarts=RESTARTS, max_task_retries=RESTARTS,
            )(Reading)  # fmt: skip
            some = min(actors, len(missing))
            pool = ActorPool([made.remote(job, scanner.hash) for _ in range(some)])
            try:
                for texts, tokens in pool.map_unordered(_asked, missing):
                    done.read(texts, tokens)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                raise RegardError(
                    "an actor of Ray failed, and with it the scan",
                    got=str(cause)[:600],
                    do="run the same command again: shards that are whole are kept",
                ) from None
        return merge(scanner)


def _asked(actor: Any, shard: int) -> Any:
    return actor.read.remote(shard)
