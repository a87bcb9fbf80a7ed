"""Experiments train small models."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _small_products(plain_products: None) -> None:
    """Most of a training step is products of small matrices."""
