"""Runs of queries and keys: the same bias, and the same gradients, as pair by pair."""

from __future__ import annotations

import pytest
import torch

from regard import biases
from regard.biases.bias import Bias
from regard.values import Shape

SHAPE = Shape(2, 3, 13, 21)
MADE = {
    "of all": lambda: biases.dense(torch.randn(2, 3, 13, 21)),
    "of queries": lambda: biases.dense(torch.randn(2, 1, 13, 1)),
    "of keys": lambda: biases.dense(torch.randn(1, 3, 1, 21)),
    "a table": lambda: biases.relative(torch.randn(3, 11)),
    "a table for all heads": lambda: biases.relative(torch.randn(1, 7), offset=-2),
    "a table of one distance": lambda: biases.relative(torch.randn(3, 1)),
    "slopes": lambda: biases.alibi(torch.rand(3)),
    "a function": lambda: biases.pairwise(lambda b, h, q, k: (q - k) * (h + 1)),
}
RUNS = [
    (slice(0, 13), slice(0, 21)),
    (slice(0, 1), slice(20, 21)),
    (slice(12, 13), slice(0, 21)),
    (slice(0, 13), slice(7, 8)),
    (slice(4, 9), slice(3, 17)),
    (slice(2, 12), slice(5, 7)),
]


@pytest.mark.parametrize("runs", RUNS, ids=str)
@pytest.mark.parametrize("kind", MADE)
def test_a_run_is_its_pairs(kind: str, runs: tuple[slice, slice]) -> None:
    torch.manual_seed(0)
    bias = MADE[kind]().bind(SHAPE, torch.device("cpu"))
    rows, keys = runs
    q, k = torch.arange(rows.start, rows.stop), torch.arange(keys.start, keys.stop)
    found = bias.within(rows, keys, q.device)
    assert torch.equal(found, bias.at(q, k))
    d = torch.randn(2, 3, len(q), len(k))
    by_pairs, by_runs = _gradients(bias), _gradients(bias)
    bias.pull_back(q, k, d, by_pairs)
    bias.pull_back_within(rows, keys, d, by_runs)
    for each, wanted in zip(by_runs, by_pairs, strict=True):
        torch.testing.assert_close(each, wanted)


def _gradients(bias: Bias) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn_like(t) for t in bias.tensors() if t.is_floating_point()]
