"""The promises of SECURITY.md name tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "SECURITY.md"


def named() -> list[tuple[str, str | None]]:
    """Files and tests in the order they are named; a test alone is in the file before."""
    found: list[tuple[str, str | None]] = []
    for word in re.findall(r"`([^`]+)`", PAGE.read_text()):
        file, _, test = word.partition("::")
        if re.fullmatch(r"[\w/]+\.py", file):
            found.append((file.rpartition("/")[2], test or None))
        elif not file and test:
            found.append((found[-1][0], test))
    return found


@pytest.mark.parametrize(("file", "test"), named(), ids=str)
def test_what_is_named_exists(file: str, test: str | None) -> None:
    paths = list((ROOT / "tests").rglob(file))
    assert paths
    assert test is None or any(f"def {test}(" in path.read_text() for path in paths)


def test_enough_is_named() -> None:
    assert len(named()) > 40
