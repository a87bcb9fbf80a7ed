"""Every test of watching ends with nothing left behind of it."""

from collections.abc import Iterator

import pytest

from tests.watching.left_behind import nothing_in_the_process


@pytest.fixture(scope="module", autouse=True)
def _small_products(plain_products: None) -> None:
    """Models are small, and run twice: watched, and as they are."""


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    nothing_in_the_process()
