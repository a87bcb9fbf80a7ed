"""Which messages between ranks must be copied to the host first."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest
import torch
from torch import distributed

from regard.parallel.methods.ring.transfer import _reads_host_memory_alone
from regard.parallel.ranks import Ranks

pytestmark = pytest.mark.skipif(
    not distributed.is_available(), reason="PyTorch without torch.distributed"
)


@pytest.mark.parametrize(
    ("carrier", "device", "copied"),
    [("gloo", "cuda", True), ("gloo", "cpu", False), ("nccl", "cuda", False)],
)
def test_gloo_reads_no_memory_of_a_gpu(carrier: str, device: str, copied: bool) -> None:
    group = create_autospec(distributed.ProcessGroup, instance=True)
    group._get_backend.return_value.name.return_value = carrier
    assert _reads_host_memory_alone(Ranks(group, 0, 2), torch.device(device)) == copied
