"""Calls of DTensors: answers say where they are, and are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import regard
from regard import RegardError, masks, parallel
from regard.parallel.dtensors import DTensorTrace

HEADS = 4


def drawn(tokens: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = (2, HEADS, tokens, 8), (2, 2, tokens, 8), (2, 2, tokens, 5)
    return [torch.randn(n, generator=draw, dtype=torch.float64) for n in sizes]


def questions(t: Any) -> dict[str, Tensor]:
    """Answers of a trace, by the names that placements have for them."""
    blocks = torch.ones(HEADS, -(-t.layout.length // 4), 2, dtype=torch.bool)
    blocks[:, :, 1] = False
    recall = t.recall(blocks, (4, -(-t.layout.length // 2)))
    return {
        "out": t.out, "lse": t.lse, "max_logit": t.max_logit, "entropy": t.entropy,
        "mean_logit": t.mean_logit, "std_logit": t.std_logit, "min_logit": t.min_logit,
        "received": t.received(), "mass": t.mass([0, 2]), "top": t.top(2)[0],
        "weights": t.weights(queries=[0, 3]), "logits": t.logits(queries=[3], keys=[0, 1]),
        "map": t.map(2), "recall().rows": recall.rows, "recall().mean": recall.mean,
        "indexer_target": t.indexer_target(4),
    }  # fmt: skip


class Alone:
    """One process's trace, asked the same."""

    def __init__(self, trace: regard.Trace, length: int) -> None:
        self.trace, self.layout = trace, parallel.contiguous(length, 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trace, name)


PLACED = {"received": Shard(2), "indexer_target": Shard(1)} | dict.fromkeys(
    ("weights", "logits", "map", "recall().mean"), Replicate()
)


def shared_call(tokens: int, method: str) -> None:
    """Also of uneven and empty shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = [t.requires_grad_() for t in drawn(tokens)]
    mine = [distribute_tensor(t.detach(), mesh, [Shard(2)]).requires_grad_() for t in whole]
    mask = masks.causal() & masks.window(5)
    t = parallel.trace(*mine, mask=mask, method=method)
    assert isinstance(t, DTensorTrace)
    expected = questions(Alone(regard.trace(*whole, mask=mask, backend="reference"), tokens))
    for name, answer in questions(t).items():
        assert isinstance(answer, DTensor), name
        assert answer.placements == (PLACED.get(name, Shard(2)),), name
        assert answer.shape == expected[name].shape, name
        torch.testing.assert_close(answer.full_tensor(), expected[name], msg=name)
    out = parallel.attention(*mine, mask=mask, method=method)
    torch.testing.assert_close(out.full_tensor(), expected["out"])
    # Each rank adds its own part; what all have counts once.
    loss = out.square().sum() + t.lse.sum() + t.map(2).square().sum()
    found = torch.autograd.grad(loss, mine)
    want = expected["out"].square().sum() + expected["lse"].sum()
    wanted = torch.autograd.grad(want + expected["map"].square().sum(), whole)
    for name, gradient, true in zip("qkv", found, wanted, strict=True):
        assert gradient.placements == (Shard(2),)
        torch.testing.assert_close(gradient.full_tensor(), true, msg=name)
    assert type(t.local.out) is Tensor
    assert t.detach().lse.placements == (Shard(2),)
    assert parallel.plan(*mine, mask=mask, method=method).method == method


def refused(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(RegardError, match=words):
        call()


def refusals() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = drawn(8)
    q, k, v = (distribute_tensor(t, mesh, [Shard(2)]) for t in whole)
    same = parallel.contiguous(8, 2)
    assert parallel.attention(q, k, v, layout=same).placements == (Shard(2),)
    refused("says otherwise", lambda: parallel.attention(q, k, v, layout=parallel.zigzag(8, 2)))
    refused("says otherwise", lambda: parallel.attention(q, k, v, layout="zigzag"))
    refused("all DTensors, or none", lambda: parallel.attention(q, k.to_local(), v))
    heads = distribute_tensor(whole[0], mesh, [Shard(1)])
    refused("sharded along one axis", lambda: parallel.attention(heads, k, v))
    every = distribute_tensor(whole[1], mesh, [Replicate()])
    refused("sharded along one axis", lambda: parallel.trace(q, every, v))
    both = init_device_mesh("cpu", (2, 1))
    spread = [distribute_tensor(t, both, [Shard(2), Replicate()]) for t in whole]
    refused("along one axis of a mesh", lambda: parallel.attention(*spread))
    t = parallel.trace(q, k, v)
    refused("not sharded as a DTensor", lambda: t.indexer_target(4, queries=(0, 3)))
    assert t.local.indexer_target(4, queries=(0, 3)).shape[0] == 2


def moved() -> None:
    """Heads that were sharded, by a collective that may not have ended yet."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = drawn(8)
    # Of two key heads each rank has one.
    q, k, v = (distribute_tensor(t, mesh, [Shard(1)]) for t in whole)
    for learns in (False, True):
        with torch.set_grad_enabled(learns):
            there = [t.redistribute(placements=[Shard(2)]) for t in (q, k, v)]
            out = parallel.attention(*there, mask=masks.causal())
            want = regard.attention(*whole, mask=masks.causal(), backend="reference")
            torch.testing.assert_close(out.full_tensor(), want)


def of_two() -> dict[str, Callable[[], None]]:
    return {
        "DTensors, ulysses": partial(shared_call, 37, "ulysses"),
        "DTensors, all_gather": partial(shared_call, 37, "all_gather"),
        "DTensors, ring": partial(shared_call, 37, "ring"),
        "DTensors, moved": moved,
        "DTensors, refusals": refusals,
    }


def of_four() -> dict[str, Callable[[], None]]:
    # Of nine tokens in runs of three, the last rank has none.
    return {"DTensors, a rank without tokens": partial(shared_call, 9, "all_gather")}
