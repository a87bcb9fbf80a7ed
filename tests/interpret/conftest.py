"""Attention written out as n×n, to hold the uses of traces to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard import Trace, masks

Case = tuple[Trace, Tensor]


@pytest.fixture(scope="module", autouse=True)
def _small_products(plain_products: None) -> None:
    """What is asked of models runs them many times over."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.fixture
def traced() -> Callable[..., Case]:
    """A causal call with grouped heads: its trace, and its weights [B, H, N, N] by softmax."""

    def make(B: int = 2, H: int = 6, G: int = 2, N: int = 23, D: int = 8, seed: int = 0) -> Case:
        q = 2 * numbers(B, H, N, D, seed=seed)
        k = numbers(B, G, N, D, seed=seed + 1)
        logits = q @ k.repeat_interleave(H // G, 1).mT / D**0.5
        future = torch.ones(N, N, dtype=torch.bool).triu(1)
        weights = logits.masked_fill(future, -torch.inf).softmax(-1)
        return regard.trace(q, k, k, mask=masks.causal()), weights

    return make
