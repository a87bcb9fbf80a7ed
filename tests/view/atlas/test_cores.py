"""Small computations on one core each: nobody else's cores are taken away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from regard.view.atlas import Atlas, on_cores, one_core
from regard.view.web.html_page import stored_head
from tests.view.small_traces import seen


@pytest.fixture(autouse=True)
def _three() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def elsewhere(what: Callable[[], Any]) -> Any:
    """What a thread finds that has just started."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(what()))
    thread.start()
    thread.join()
    return found[0]


def test_one_core_is_for_this_thread_alone() -> None:
    with one_core():
        assert torch.get_num_threads() == 1
        assert elsewhere(torch.get_num_threads) == 3
    assert torch.get_num_threads() == 3
    assert elsewhere(torch.get_num_threads) == 3


def test_one_core_is_given_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), one_core():
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3


def test_many_are_done_at_once_each_on_one_core_and_in_order() -> None:
    together = threading.Barrier(3, timeout=20)

    def one(place: int) -> tuple[int, int]:
        together.wait()
        return place, torch.get_num_threads()

    assert list(on_cores(one, range(6))) == [(place, 1) for place in range(6)]
    assert torch.get_num_threads() == 3


def test_heads_read_at_once_are_the_heads_read_one_by_one() -> None:
    with one_core():
        m = Atlas.of(seen(60, heads=6))[0]
        alone = [stored_head(m, 0, 4, head) for head in range(6)]
    for _ in range(3):
        assert list(on_cores(lambda head: stored_head(m, 0, 4, head), range(6))) == alone
