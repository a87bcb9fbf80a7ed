"""Shared set-up: quick, repeatable property tests, and the device that parity is tested on."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.parity import cases

settings.register_profile(
    "regard",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("regard")
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests/parity/test_conformance.py runs")


def pytest_configure(config: pytest.Config) -> None:
    cases.DEVICE = config.getoption("--device")
