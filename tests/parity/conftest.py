"""Which tests a process runs: kernels interpreted, everything else, or on a GPU all of them."""

import os

import pytest

from tests.parity import cases
from tests.parity.interpreter import quicken


def pytest_configure(config: pytest.Config) -> None:
    # The thread of a first backward pass finds no CUDA context, makes one and says so.
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS:UserWarning")
    if os.environ.get("TRITON_INTERPRET") == "1":
        quicken()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """TRITON_INTERPRET must be set before triton is imported, so on a CPU it parts processes."""
    if cases.DEVICE != "cpu":
        return
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    mine, others = [], []
    for item in items:
        fits = (item.get_closest_marker("interpreted") is not None) == interpreted
        (mine if fits else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = mine
