"""Actors of Ray give the same bytes, also when one of them is killed."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from regard import RegardError
from regard.scanning import Job, ray_pool
from tests.scanning.children import alone
from tests.scanning.conftest import unlike


def test_without_ray_it_says_how_to_get_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_pool, "find_spec", lambda _: None)
    with pytest.raises(RegardError, match=r"pip install 'regard\[ray\]'"):
        ray_pool.scan_on_ray(job, 2)


class Dying(ray_pool.Reading):
    """Killed once, at its first shard."""

    def read(self, shard: int) -> tuple[int, int]:
        once = self.scanner.folder.with_suffix(".killed")
        if not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(shard)


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
def test_a_pool_of_actors_gives_the_same_bytes(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(ray_pool, "Reading", Dying)
    one = replace(job, folder=str(tmp_path / "one"))
    alone(one)
    try:
        found = ray_pool.scan_on_ray(job, 2)
    finally:
        ray.shutdown()
    assert Path(job.folder).with_suffix(".killed").exists()
    assert found.texts == 7
    assert unlike(job.folder, one.folder) == []
