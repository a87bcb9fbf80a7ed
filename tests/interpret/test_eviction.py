"""Dropping keys from a cache: held to the published algorithms, written out over n×n."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

import regard
from regard import RegardError, interpret, masks
from regard.caches import WindowVotes
from tests.interpret.conftest import Case, numbers
from tests.traces.test_traces import largest

B, H, G, N = 2, 6, 2, 23


def grouped(scores: Tensor) -> Tensor:
    """Summed over the query heads that share a key head, by hand."""
    return torch.stack([scores[:, :3].sum(1), scores[:, 3:].sum(1)], dim=1)


def places(scores: Tensor, keep: int, last: int) -> list[list[list[int]]]:
    """What stays, by sorting plain lists."""
    n = scores.shape[-1]
    return [
        [
            sorted(
                sorted(range(n), key=lambda i: -float(head[i]))[: keep - last]
                + list(range(N - last, N))
            )
            for head in entry
        ]
        for entry in scores
    ]


def test_heavy_hitters_are_those_of_h2o(traced: Callable[..., Case]) -> None:
    trace, weights = traced(B, H, G, N)
    want = grouped(weights.sum(2))
    got = interpret.heavy_hitters(trace, 10, recent=4)
    torch.testing.assert_close(got.scores, want)
    assert got.keep.tolist() == places(want[..., : N - 4], 10, 4)


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize("width", [1, 3, 7])
def test_votes_are_those_of_snapkv(
    pool: Literal["max", "mean"], width: int, traced: Callable[..., Case]
) -> None:
    trace, weights = traced(B, H, G, N)
    votes = grouped(weights[:, :, -5:, :-5].sum(2))
    pooled = {"max": max_pool1d, "mean": avg_pool1d}[pool]
    want = pooled(votes, width, stride=1, padding=width // 2)
    got = interpret.window_votes(trace, 9, window=5, pool=pool, width=width)
    torch.testing.assert_close(got.scores, want)
    if width == 1:  # wider pools of the largest give neighbours equal scores
        assert got.keep.tolist() == places(want, 9, 5)


def test_the_last_keys_stay_even_if_nobody_looks_at_them() -> None:
    q, k = torch.ones(1, 1, 12, 4), torch.zeros(1, 1, 12, 4)
    k[..., 6:, :] = -9.0
    trace = regard.trace(q, k, k, mask=masks.causal())
    assert interpret.heavy_hitters(trace, 5, recent=3).keep.tolist() == [[[0, 1, 9, 10, 11]]]
    votes = interpret.window_votes(trace, 5, window=3, width=1)
    assert votes.keep[0, 0, 2:].tolist() == [9, 10, 11]


@pytest.mark.parametrize(("keep", "recent"), [(23, 4), (4, 4), (0, 0), (23, 23)])
def test_all_or_only_the_last_can_stay(keep: int, recent: int, traced: Callable[..., Case]) -> None:
    got = interpret.heavy_hitters(traced(B, H, G, N)[0], keep, recent=recent).keep
    assert got.shape == (B, G, keep)
    assert all(head == sorted(set(head)) for entry in got.tolist() for head in entry)


def test_what_stays_indexes_a_cache(traced: Callable[..., Case]) -> None:
    trace, _ = traced(B, H, G, N)
    keep = interpret.heavy_hitters(trace, 10, recent=4).keep
    k = trace.inputs.k
    smaller = k.gather(2, keep[..., None].expand(-1, -1, -1, k.shape[-1]))
    assert torch.equal(smaller[1, 0], k[1, 0, keep[1, 0]])


def test_a_long_prompt_costs_no_matrix() -> None:
    n = 4096
    q, k = numbers(1, 1, n, 16), numbers(1, 1, n, 16, seed=1)
    trace = regard.trace(q, k, k, mask=masks.causal())
    assert largest(lambda: interpret.heavy_hitters(trace, 512, recent=64)) < n * n * 4 / 4
    assert largest(lambda: interpret.window_votes(trace, 512)) < n * n * 4 / 16


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "more than there are": (
        lambda t: interpret.heavy_hitters(t, 24, recent=2),
        r"keep=24, recent=2, with 23 keys\n +accepted: 0 <= recent <= keep <= 23",
    ),
    "fewer than the last": (
        lambda t: interpret.window_votes(t, 4, window=5),
        "the last window= are among them",
    ),
    "an even width": (
        lambda t: interpret.window_votes(t, 9, window=5, width=4),
        r"pool='max', width=4\n.*an odd width",
    ),
    "a broken width": (
        lambda t: interpret.window_votes(t, 9, window=5, width=3.0),  # type: ignore[arg-type]
        "width= must be a whole number",
    ),
    "an unknown pool": (
        lambda t: interpret.window_votes(t, 9, window=5, pool="sum"),
        "pool='sum'",
    ),
    "no window": (lambda t: interpret.window_votes(t, 9, window=0), "window= counts the last"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_done_is_refused(
    kind: str, traced: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, text = WRONG[kind]
    trace, _ = traced(B, H, G, N)
    # Wrong words reach regard's own checks even when the shape-checking hook is on.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(RegardError, match=text):
        ask(trace)


def test_a_step_of_generating_has_too_few_queries() -> None:
    q, k = numbers(1, 2, 1, 4), numbers(1, 2, 40, 4)
    with pytest.raises(RegardError, match=r"(?s)32, with 1 queries.*use a trace of the prompt"):
        interpret.window_votes(regard.trace(q, k, k), 40)


def test_a_window_as_long_as_the_text_keeps_all() -> None:
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    trace = regard.trace(q, k, k, mask=masks.causal())
    kept = interpret.window_votes(trace, 6, window=6)
    assert kept.scores.shape == (2, 2, 0)
    assert kept.keep.tolist() == [[list(range(6))] * 2] * 2


def test_numbers_of_keys_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    # Wrong types reach regard's own checks even when the shape-checking hook is on.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    trace = regard.trace(q, k, k, mask=masks.causal())
    with pytest.raises(RegardError, match=r"keep[\s\S]*2\.5"):
        interpret.heavy_hitters(trace, 2.5, recent=1)  # type: ignore[arg-type]
    assert interpret.heavy_hitters(trace, 3, recent=1).keep.shape == (1, 2, 3)


def test_of_equal_votes_the_first_count_as_in_a_cache() -> None:
    """Neighbours that are pooled by the largest have equal votes."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 150, 8), torch.randn(2, 2, 150, 8)
    trace = regard.trace(q, k, k, mask=masks.causal())
    for keep in (9, 30, 77):
        policy = WindowVotes(keep, window=4, width=5)
        scores = policy.score(trace, torch.zeros(2, 2, 150))
        assert scores is not None
        held = policy.keep(scores, torch.ones(2, 2, 150, dtype=torch.bool))
        found = interpret.window_votes(trace, keep, window=4, width=5).keep
        assert torch.equal(found, held.nonzero()[:, 2].view(2, 2, keep))
