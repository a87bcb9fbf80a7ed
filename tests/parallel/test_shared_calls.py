"""Calls that two and four ranks share: every answer and gradient is that of one process."""

from __future__ import annotations

import socket
from functools import partial

import pytest
from torch import distributed

from tests.parallel import cases
from tests.parallel.processes import Found, run

pytestmark = pytest.mark.skipif(
    not distributed.is_available(), reason="PyTorch without torch.distributed"
)
TWO, FOUR = list(cases.of_two()), list(cases.of_four())


@pytest.fixture(scope="module")
def of_two() -> Found:
    return run(cases.of_two, 2)


@pytest.fixture(scope="module")
def of_four() -> Found:
    return run(cases.of_four, 4)


@pytest.mark.parametrize("case", TWO)
def test_two_ranks(case: str, of_two: Found) -> None:
    _assert_well(of_two, case)


@pytest.mark.real
def test_any_three_of_a_method_mask_grouping_and_layout() -> None:
    found = run(cases.combinations, 2, seconds=600)
    assert len(found) == 45
    for case in found:
        _assert_well(found, case)


@pytest.mark.parametrize("case", FOUR)
def test_four_ranks(case: str, of_four: Found) -> None:
    _assert_well(of_four, case)


def test_the_example_of_the_documentation(free_port: int) -> None:
    found = run(partial(cases.of_documentation, free_port), 2, joined=False)
    _assert_well(found, "example")


@pytest.fixture
def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _assert_well(found: Found, case: str) -> None:
    for rank, said in enumerate(found.get(case, [f"not reached: {found.get('start')}"])):
        assert said is None, f"rank {rank}: {said}"
