"""Whom a rank that fails may tell, and what a group forgets."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor, distributed

from regard import RegardError
from regard.parallel import handshake
from regard.parallel.ranks import Ranks

pytestmark = pytest.mark.skipif(
    not distributed.is_available(), reason="PyTorch without torch.distributed"
)
GPU = torch.device("meta")
"""Some device that is not the CPU."""


def ranks() -> Ranks:
    group = create_autospec(distributed.ProcessGroup, instance=True)
    group.group_name = "0"
    return Ranks(group, 0, 2)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Ranks]:
    """Which groups compared something; all say the same."""
    asked: list[Ranks] = []

    def alike(who: Ranks, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        asked.append(who)
        return (tensors[0].expand(who.size, -1),)

    monkeypatch.setattr(handshake, "gathered", alike)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *a, device=None, **o: tensor(*a, **o))
    return asked


def fail(who: Ranks, device: torch.device) -> None:
    with pytest.raises(RegardError, match="no"), handshake.refused_together(who, device):
        raise RegardError("no")


def test_on_a_gpu_a_rank_that_fails_enters_no_collective_that_others_may_not(
    compared: list[Ranks],
) -> None:
    who = ranks()
    fail(who, GPU)
    assert len(compared) == 1
    handshake.agree(who, GPU, {"function": "trace"})
    fail(who, GPU)
    assert len(compared) == 2
    fail(who, torch.device("cpu"))
    assert len(compared) == 3


def test_errors_that_are_none_of_ours_are_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, str]] = []
    monkeypatch.setattr(handshake, "agree", lambda who, device, said: told.append(said))
    with (
        pytest.raises(ZeroDivisionError),
        handshake.refused_together(ranks(), torch.device("cpu")),
    ):
        _ = 1 // 0
    (said,) = told
    assert said["refused"].startswith("ZeroDivisionError: integer division")


def test_groups_of_one_name_and_of_others_are_apart(
    compared: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_ROOM", 2)
    one, other = ranks(), ranks()
    for who in (one, other):
        handshake.agree(who, GPU, {"function": "trace"})
    assert compared == [one, other]
    # What the other group agrees on lets this one forget nothing, or its members would differ.
    for i in range(5):
        handshake.agree(other, GPU, {"question": str(i)})
    compared.clear()
    handshake.agree(one, GPU, {"function": "trace"})
    assert not compared
