"""What the tests of masks share: a mask written out by hand, one pair at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jaxtyping
import pytest
import torch
from torch import Tensor


class Pair(NamedTuple):
    """One pair: query i, which stands at position p among the keys, and key j."""

    b: int
    h: int
    i: int
    p: int
    j: int


ByHand = Callable[..., Tensor]


@pytest.fixture
def by_hand() -> ByHand:
    """A dense mask from a rule about one pair, with plain loops."""

    def dense(
        rule: Callable[[Pair], bool], B: int, H: int, Q: int, K: int, offset: int | None = None
    ) -> Tensor:
        table = torch.zeros(B, H, Q, K, dtype=torch.bool)
        for b in range(B):
            for h in range(H):
                for i in range(Q):
                    position = i + (K - Q if offset is None else offset)
                    for j in range(K):
                        table[b, h, i, j] = rule(Pair(b, h, i, position, j))
        return table

    return dense


@pytest.fixture
def without_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong types reach regard's own checks even when the shape-checking hook is on."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
