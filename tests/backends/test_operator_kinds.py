"""What decides how a call that an operator is told of is run changes its kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.backends.operator_kinds import _ROOM, keep, kind_of
from tests.torch_settings import deterministic, threads


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape or (1, 2, 6, 8), dtype=dtype)


def kind(**changed: Any) -> Any:
    given: dict[str, Any] = {name: tensor() for name in "qkv"}
    given |= {"text": "[causal]", "integers": [0], "floats": [0.5], "softcap": None}
    return kind_of(**(given | changed))


CHANGES: dict[str, dict[str, Any]] = {
    f"{what} of {name}": {name: make()}
    for name in "qkv"
    for what, make in {
        "length": lambda: tensor(1, 2, 7, 8),
        "layout": lambda: tensor(1, 6, 2, 8).transpose(1, 2),
        "type": lambda: tensor(dtype=torch.bfloat16),
        "place": lambda: torch.zeros(97)[1:].view(1, 2, 6, 8),
    }.items()
}
CHANGES |= {
    "text": {"text": "[window]"},
    "integers": {"integers": [1]},
    "floats": {"floats": [0.25]},
    "softcap": {"softcap": 2.0},
}
AROUND: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "threads": lambda: threads(torch.get_num_threads() + 1),
    "a fixed order": deterministic,
}


def test_equal_calls_are_of_one_kind() -> None:
    assert kind() == kind(integers=(0,), floats=(0.5,))
    assert hash(kind()) == hash(kind())


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_differs_is_of_another(change: str) -> None:
    assert kind(**CHANGES[change]) != kind()


@pytest.mark.parametrize("around", AROUND)
def test_what_pytorch_was_told_is_part_of_it(around: str) -> None:
    before = kind()
    with AROUND[around]():
        assert kind() != before


@pytest.mark.parametrize("casts", [True, False])
def test_under_autocast_there_is_none(casts: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16) if casts else nullcontext():
        assert (kind() is None) == casts


def test_so_many_are_remembered() -> None:
    known: dict[Any, int] = {}
    for i in range(3 * _ROOM):
        assert keep(known, i, -i) == -i
        assert known[i] == -i
        assert len(known) <= _ROOM
