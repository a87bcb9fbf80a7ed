"""Dropping tokens that get little attention: held to plain n×n arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard import RegardError, interpret
from tests.interpret.conftest import Case, numbers
from tests.traces.test_traces import largest

IMAGE = range(3, 15)
QUERIES: dict[str, tuple[Any, list[int]]] = {
    "the last": (-1, [22]),
    "later text": (range(15, 23), list(range(15, 23))),
    "all": (None, list(range(23))),
    "some": (torch.tensor([16, 20]), [16, 20]),
}


@pytest.mark.parametrize("queries", QUERIES)
def test_scores_are_the_mean_attention_tokens_get(
    queries: str, traced: Callable[..., Case]
) -> None:
    trace, weights = traced()
    chosen, rows = QUERIES[queries]
    want = weights[:, :, rows, IMAGE.start : IMAGE.stop].mean((1, 2))
    got = interpret.prune(trace, IMAGE, 0.5, queries=chosen)
    torch.testing.assert_close(got.scores, want)


def test_the_strongest_stay_in_order_beside_all_other_tokens(traced: Callable[..., Case]) -> None:
    trace, weights = traced()
    got = interpret.prune(trace, IMAGE, 1 / 3).keep
    for entry, kept in zip(weights[:, :, -1, 3:15].mean(1), got.tolist(), strict=True):
        best = [3 + place for place in entry.argsort(descending=True)[:4].tolist()]
        assert kept == sorted([0, 1, 2, *best, *range(15, 23)])


def test_tokens_can_be_named_by_a_mask(traced: Callable[..., Case]) -> None:
    trace, _ = traced()
    image = torch.zeros(23, dtype=torch.bool)
    image[[4, 5, 9]] = True
    by_mask, by_place = (interpret.prune(trace, t, 0.5) for t in (image, [4, 5, 9]))
    assert torch.equal(by_mask.keep, by_place.keep)
    assert by_mask.keep.shape == (2, 20 + 2)


@pytest.mark.parametrize(("share", "stay"), [(0.0, 11), (0.01, 12), (0.5, 17), (1.0, 23)])
def test_a_share_is_rounded_up(share: float, stay: int, traced: Callable[..., Case]) -> None:
    trace, _ = traced()
    assert interpret.prune(trace, IMAGE, share).keep.shape == (2, stay)


def test_a_long_image_costs_no_matrix() -> None:
    q, k = numbers(1, 1, 4096, 16), numbers(1, 1, 4096, 16, seed=1)
    trace = regard.trace(q, k, k, mask=regard.masks.causal())
    ask = lambda: interpret.prune(trace, range(2048), 0.5, queries=range(2048, 4096))  # noqa: E731
    assert largest(ask) < 2048 * 2048 * 4 / 4


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "share": (lambda t: interpret.prune(t, IMAGE, 50), "share= is how much of the tokens stays"),
    "tokens": (lambda t: interpret.prune(t, [40], 0.5), "tokens: index out of range"),
    "queries": (lambda t: interpret.prune(t, IMAGE, 0.5, queries=[]), "there must be a query"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_done_is_refused(kind: str, traced: Callable[..., Case]) -> None:
    ask, text = WRONG[kind]
    with pytest.raises(RegardError, match=text):
        ask(traced()[0])


def test_a_trace_without_heads_is_refused() -> None:
    x = numbers(5, 4)
    with pytest.raises(RegardError, match=r"needs a trace that has heads\n +got: +a trace of 2-D"):
        interpret.prune(regard.trace(x, x, x), [1], 0.5)


def test_a_share_is_not_rounded_up_by_how_numbers_are_written() -> None:
    q = torch.randn(1, 1, 100, 4)
    trace = regard.trace(q, q, q)
    for share, many in ((0.07, 7), (0.55, 55), (0.29, 29), (0.005, 1), (0.0, 0), (1.0, 100)):
        assert interpret.prune(trace, range(100), share).keep.shape == (1, many)


def test_a_token_named_twice_is_refused() -> None:
    q = torch.randn(1, 1, 10, 4)
    with pytest.raises(RegardError, match=r"tokens=[\s\S]*twice"):
        interpret.prune(regard.trace(q, q, q), [3, 3, 4], 0.5)
