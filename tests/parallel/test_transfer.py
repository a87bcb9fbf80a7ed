"""Which messages between ranks must be copied to the host first."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import distributed

from regard.parallel.ranks import Ranks
from regard.parallel.ring.transfer import _reads_host_memory_alone

pytestmark = pytest.mark.skipif(
    not distributed.is_available(), reason="PyTorch without torch.distributed"
)


class Named:
    """A group, and what carries its messages, of which only the name matters."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _get_backend(self, device: torch.device) -> Named:
        return self

    def name(self) -> str:
        return self._name


@pytest.mark.parametrize(
    ("carrier", "device", "copied"),
    [("gloo", "cuda", True), ("gloo", "cpu", False), ("nccl", "cuda", False)],
)
def test_gloo_reads_no_memory_of_a_gpu(carrier: str, device: str, copied: bool) -> None:
    ranks = Ranks(cast(Any, Named(carrier)), 0, 2)
    assert _reads_host_memory_alone(ranks, torch.device(device)) == copied
