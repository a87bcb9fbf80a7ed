"""Fetching: what is not the very file expected is refused, with what to do."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from regard import RegardError
from tests.real.packages import UZMORPH, Package, cache


def test_a_file_in_the_cache_is_fetched_again_if_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = UZMORPH.path()
    fetch = lambda self, folder: shutil.copy(right, folder)  # noqa: E731
    monkeypatch.setattr(Package, "_fetch", fetch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = cache() / UZMORPH.file
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"half of it")
    assert UZMORPH.path().read_bytes() == right.read_bytes()


@pytest.mark.parametrize(
    "change", [{"sha256": "0" * 64}, {"version": "9.9.9"}, {"name": "regard-no-such-package"}]
)
def test_what_cannot_be_had_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RegardError) as refused:
        replace(UZMORPH, **change).path()
    for part in ("pip download", "accepted: uzmorph_", "put that file into", str(tmp_path)):
        assert part in str(refused.value)
    assert not list(cache().glob("*.whl"))
