"""What blocks of keys hold of the weights, against all pairs in float64; and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, Trace, masks
from tests.traces.test_traces import largest

B, H, G, Q, K, D = 2, 6, 3, 45, 45, 8


def numbers(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


CASES: dict[str, tuple[Any, Tensor]] = {}
future = torch.ones(Q, K, dtype=torch.bool).tril()
lengths = torch.tensor([45, 17])
real = torch.arange(K) < lengths[:, None]
CASES["causal"] = masks.causal(), future.expand(B, 1, Q, K)
CASES["all"] = None, torch.ones(B, 1, Q, K, dtype=torch.bool)
CASES["padding"] = masks.causal() & masks.padding(lengths), future & real[:, None, None]
left = torch.arange(K) >= torch.tensor([0, 9])[:, None]
CASES["empty rows"] = masks.causal() & masks.keep(left[:, None, None]), future & left[:, None, None]
CASES["window"] = masks.causal() & masks.window(11), future.triu(-11).expand(B, 1, Q, K)


def pairs(q: Tensor, k: Tensor, visible: Tensor, sink: Tensor | None = None) -> Tensor:
    """All weights, in float64; a row that sees nothing has none."""
    logits = q.double() @ k.double().repeat_interleave(H // G, 1).mT / D**0.5
    logits = logits.masked_fill(~visible, -torch.inf)
    top = logits.amax(-1, keepdim=True).clamp_min(-1e9)
    if sink is not None:
        top = torch.maximum(top, sink[:, None, None])
    parts = (logits - top).exp()
    total = parts.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink[:, None, None] - top).exp()
    return parts / torch.where(total > 0, total, 1.0)


def blockwise(kept: Tensor, size: tuple[int, int]) -> Tensor:
    return kept.repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)[..., :Q, :K]


def recalled(weights: Tensor, kept: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    total = weights.sum(-1)
    share = (weights * blockwise(kept, size)).sum(-1) / total.clamp_min(1e-300)
    rows = torch.where(total > 0, share, 1.0)
    mean = torch.stack(
        [torch.stack([r[t > 0].mean() for r, t in zip(*one, strict=True)])
         for one in zip(rows, total, strict=True)]
    )  # fmt: skip
    return rows, mean


def target(weights: Tensor, size: int) -> Tensor:
    summed = weights.sum(1)
    blocks = torch.stack([part.sum(-1) for part in summed.split(size, -1)], -1)
    return blocks / blocks.sum(-1, keepdim=True).clamp_min(1e-300)


def choice(size: tuple[int, int], *lead: int) -> Tensor:
    return numbers(*lead, -(-Q // size[0]), -(-K // size[1]), seed=7) > 0


@pytest.mark.parametrize("size", [(8, 8), (16, 5), (45, 1), (64, 64)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_recall_and_target_are_those_of_all_pairs(name: str, size: tuple[int, int]) -> None:
    mask, visible = CASES[name]
    q, k = 2 * numbers(B, H, Q, D), numbers(B, G, K, D, seed=1)
    weights, trace = pairs(q, k, visible), regard.trace(q, k, k, mask=mask)
    kept = choice(size, B, H)
    rows, mean = recalled(weights, kept, size)
    got = trace.recall(kept, size)
    torch.testing.assert_close(got.rows, rows)
    torch.testing.assert_close(got.mean, mean)
    torch.testing.assert_close(trace.indexer_target(size[1]), target(weights, size[1]))
    part = trace.indexer_target(size[1], queries=(3, 30))
    torch.testing.assert_close(part, target(weights, size[1])[:, 3:30])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_narrow_numbers_give_what_they_would_in_wide_ones(dtype: torch.dtype) -> None:
    q, k = (2 * numbers(B, H, Q, D)).to(dtype), numbers(B, G, K, D, seed=1).to(dtype)
    weights = pairs(q, k, CASES["causal"][1])
    trace, kept = regard.trace(q, k, k, mask=masks.causal()), choice((8, 8), B, H)
    found = trace.recall(kept, 8), trace.indexer_target(8)
    # Scores and sums are float32, whatever the inputs are.
    near = {"atol": 2e-6, "rtol": 1e-5}
    torch.testing.assert_close(found[0].rows, recalled(weights, kept, (8, 8))[0].float(), **near)
    torch.testing.assert_close(found[1], target(weights, 8).float(), **near)


@pytest.mark.parametrize("above", [8.0, 16.0, 20.0, 30.0])
def test_recall_is_of_keys_also_where_a_sink_takes_nearly_all(above: float) -> None:
    q, k = 2 * numbers(B, H, Q, D), numbers(B, G, K, D, seed=1)
    sink = torch.full((H,), above)
    kept = choice((8, 8), B, H)
    trace = regard.trace(q.float(), k.float(), k.float(), sink=sink)
    want = recalled(pairs(q.float(), k.float(), CASES["all"][1], sink), kept, (8, 8))
    for got, right in zip(trace.recall(kept, 8), want, strict=True):
        torch.testing.assert_close(got, right.float(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["causal", "empty rows"])
def test_gradients_are_those_of_all_pairs(name: str) -> None:
    mask, visible = CASES[name]
    kept, want = choice((16, 5), B, H), []
    pulls = numbers(B, H, Q, seed=3), numbers(B, Q, 9, seed=4)
    for ours in (True, False):
        q = (2 * numbers(B, H, Q, D)).requires_grad_()
        k = numbers(B, G, K, D, seed=1).requires_grad_()
        sink = numbers(H, seed=2).requires_grad_()
        if ours:
            trace = regard.trace(q, k, k, mask=mask, sink=sink)
            found, mass = trace.recall(kept, (16, 5)).rows, trace.indexer_target(5)
            some = trace.indexer_target(5, queries=(30, 45))
        else:
            weights = pairs(q, k, visible, sink)
            found, mass = recalled(weights, kept, (16, 5))[0], target(weights, 5)
            some = target(weights, 5)[:, 30:]
        none = trace.indexer_target(5, queries=(7, 7)) if ours else mass[:, :0]
        assert none.shape == (B, 0, 9)
        loss = (found * pulls[0]).sum() + (mass * pulls[1]).sum() + (some**2).sum() + none.sum()
        loss.backward()
        want.append((found.detach(), q.grad, k.grad, sink.grad))
    for got, right in zip(*want, strict=True):
        torch.testing.assert_close(got, right)
    assert all(float(t.abs().max()) > 1e-3 for t in want[0])


def test_choices_are_told_in_several_ways() -> None:
    q, k = numbers(B, H, Q, D), numbers(B, G, K, D, seed=1)
    trace = regard.trace(q, k, k, mask=masks.causal())
    weights = pairs(q, k, CASES["causal"][1])
    for lead in ((), (1, H), (B, 1), (H,)):
        kept = choice((8, 8), *lead)
        want = recalled(weights, kept.expand(B, H, -1, -1), (8, 8))[0]
        torch.testing.assert_close(trace.recall(kept, 8).rows, want)
    by_key_head = choice((8, 8), B, G)
    want = recalled(weights, by_key_head.repeat_interleave(2, 1), (8, 8))[0]
    torch.testing.assert_close(trace.recall(by_key_head, 8).rows, want)
    named = torch.tensor([[0, -1], [1, 0], [2, 2], [3, -1], [-1, -1], [5, 0]])
    kept = torch.zeros(6, 6, dtype=torch.bool)
    for block, keys in enumerate(named.tolist()):
        kept[block, [i for i in keys if i >= 0]] = True
    assert torch.equal(trace.recall(named, 8).rows, trace.recall(kept, 8).rows)
    best = trace.map((6, 6), queries=(0, 45), keys=(0, 45)).topk(2).indices
    assert float(trace.recall(best, 8).mean.mean()) > float(trace.recall(named, 8).mean.mean())
    alone = regard.trace(q[0, 0], k[0, 0], k[0, 0], mask=masks.causal())
    assert torch.equal(alone.recall(kept, 8).rows, trace.recall(kept, 8).rows[0, 0])
    assert alone.indexer_target(8).shape == (Q, 6)
    everything = trace.recall(torch.ones(6, 6, dtype=torch.bool), 8).rows
    torch.testing.assert_close(everything, torch.ones(B, H, Q, dtype=torch.float64))


def test_a_long_call_costs_no_matrix() -> None:
    n = 1024
    q, k = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(2))
    trace = regard.trace(q, k, k, mask=masks.causal())
    near = torch.eye(n // 64, dtype=torch.bool)
    assert largest(lambda: trace.recall(near).rows.sum().backward(retain_graph=True)) < n * n
    assert largest(lambda: trace.indexer_target(64).square().sum().backward()) < n * n


def transformed(trace: Trace) -> None:
    def loss(q: Tensor) -> Tensor:
        k = trace.inputs.k
        return regard.trace(q, k, k).recall(torch.ones(6, 6, dtype=torch.bool), 8).rows.sum()

    torch.func.grad(loss)(trace.inputs.q)


def jagged(_: Trace) -> None:
    x, ends = torch.randn(10, 2, 4), torch.tensor([0, 3, 10], dtype=torch.int32)
    regard.trace(x, x, x, cu_seqlens=ends).recall(torch.ones(1, 1).bool())


WRONG: dict[str, tuple[Callable[[Trace], Any], str]] = {
    "too few": (lambda t: t.recall(torch.ones(5, 6).bool(), 8), r"bool \[5, 6\].*\n.*6, 6\]"),
    "other heads": (lambda t: t.recall(torch.ones(4, 6, 6).bool(), 8), r"\[4, 6, 6\]"),
    "no choice": (lambda t: t.recall(torch.ones(6, 6), 8), "float32"),
    "no such block": (lambda t: t.recall(torch.tensor([[6]] * 6), 8), "0 to 5"),
    "no size": (lambda t: t.indexer_target(0), "1 or more"),
    "three sizes": (lambda t: t.recall(torch.ones(6, 6).bool(), (8, 8, 8)), "queries, keys"),  # type: ignore[arg-type]
    "a transform": (transformed, "torch.func"),
    "jagged": (jagged, "recall"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_done_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, match = WRONG[kind]
    q, k = numbers(B, H, Q, D), numbers(B, G, K, D, seed=1)
    trace = regard.trace(q, k, k, mask=masks.causal())
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(RegardError, match=match):
        ask(trace)


def test_indices_may_be_of_a_small_kind_and_a_region_is_refused_by_its_name() -> None:
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 256, 8)
    trace = regard.trace(q, k, k)
    for kind in (torch.int8, torch.int16):
        chosen = torch.tensor([[-1], [0], [5], [127]], dtype=kind)
        found = trace.recall(chosen, 1).rows
        assert torch.equal(found, trace.recall(chosen.long(), 1).rows)
    with pytest.raises(regard.RegardError, match="indexer_target: a region of queries"):
        trace.indexer_target(queries=(6, 3))
