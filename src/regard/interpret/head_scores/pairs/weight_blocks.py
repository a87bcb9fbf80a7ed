"""The weights of a call, some rows at a time: what every score is added up from, never n×n."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.biases.dense import Dense
from regard.cancellation import step
from regard.inputs import AttentionInputs
from regard.masks.algebra import And, Mask, pairs
from regard.masks.tiles import band_edges
from regard.seen import open_places, outline_of
from regard.traces import Trace

PAIRS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Weights, of all batch entries and heads together, that are held at once: a card is sooner done
with few of them than Python with its next call."""


class Block(NamedTuple):
    """Some rows: their places, the keys that any of them may see, and the weights of these."""

    queries: Int[Tensor, "q"]
    keys: Int[Tensor, "k"]
    weights: Float[Tensor, "b h q k"]


def blocks(trace: Trace, queries: Int[Tensor, "q"] | None = None) -> Iterator[Block]:
    """Rows of a trace in order; all of them, or those that are chosen."""
    x = trace.inputs
    B, H, Q, K = x.shape
    every = torch.arange(Q, device=x.q.device) if queries is None else queries
    start, stop = _edges(x)
    lse = trace.rows.lse
    if isinstance(x.bias, Dense):
        lse = lse.masked_fill(_hidden_rows(x), -torch.inf)
    most = PAIRS.get(x.q.device.type, PAIRS["cpu"])
    for q in every.split(max(1, most // max(B * H * K, 1))):
        step()
        low, high = int(start[q].min()), int(stop[q].max())
        # A row that sees nothing still counts as one: its weights are 0.
        keys = torch.arange(min(low, K - 1), max(high, low + 1, 1), device=x.q.device)[:K]
        yield Block(q, keys, trace.second_pass.weights(x, lse, q, keys))


def open_pairs(
    x: AttentionInputs, queries: Int[Tensor, "q"], keys: Int[Tensor, "k"]
) -> Bool[Tensor, "b h q k"]:
    """Which of some queries may see which of some keys: [B or 1, H or 1, q, k]."""
    allowed = torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool, device=queries.device)
    if x.mask is not None:
        allowed = pairs(x.mask, queries, keys)
    if isinstance(x.bias, Dense):
        allowed = allowed & x.bias.shows(queries, keys)
    return allowed


def open_at(
    x: AttentionInputs, queries: Int[Tensor, "*#at"], keys: Int[Tensor, "*#at"]
) -> Bool[Tensor, "b *#at"]:
    """Which of some pairs, given one by one, are allowed: broadcasts to [B, *at]. Masks that differ
    between heads, and biases that hide pairs, are not asked."""
    allowed = torch.ones(1, 1, 1, dtype=torch.bool, device=queries.device)
    if x.mask is None:
        return allowed
    entry = torch.arange(x.mask.batch, device=queries.device)[:, None, None]
    return x.mask.allows(entry, torch.zeros_like(entry), queries[None], keys[None])


def looks_back(x: AttentionInputs) -> bool:
    """Whether it is plain that no query sees a key later than itself."""

    def ends(mask: Mask) -> bool:
        band = mask.band()
        if band is not None:
            return band[1] <= x.shape.K - x.shape.Q
        return isinstance(mask, And) and (ends(mask.left) or ends(mask.right))

    return x.mask is not None and ends(x.mask)


def apart(x: AttentionInputs) -> bool:
    """Whether heads of a call differ in what they may see."""
    by_bias = isinstance(x.bias, Dense) and x.bias.tensor.shape[1] > 1
    return x.shape.H > 1 and ((x.mask is not None and x.mask.heads > 1) or by_bias)


def entropy_sums(trace: Trace) -> tuple[Float[Tensor, "b h"], Float[Tensor, "b h"]]:
    """The entropy of each head's rows, and the most that it could be: the log of how many places
    each row may look at; both added up over rows."""
    seeing = seeing_rows(trace)
    most = open_places(trace.inputs).clamp_min(1).double().log().expand_as(seeing)
    entropy = trace.rows.entropy.double().masked_fill(~seeing, 0.0).sum(-1)
    return entropy, most.masked_fill(~seeing, 0.0).sum(-1)


def seeing_rows(trace: Trace, real: Bool[Tensor, "b q"] | None = None) -> Bool[Tensor, "b h q"]:
    """The rows that see something, of those that are no padding."""
    seeing = trace.rows.max_logit.isfinite()
    if isinstance(trace.inputs.bias, Dense):
        seeing = seeing & ~_hidden_rows(trace.inputs)
    return seeing if real is None else seeing & real[:, None]


def _hidden_rows(x: AttentionInputs) -> Bool[Tensor, "#b #h q"]:
    """The rows that nothing is open to, though a mask of finite numbers gives them weights."""
    return open_places(x) == int(x.sink is not None)


def distances(x: AttentionInputs, block: Block) -> Float[Tensor, "q k"]:
    """How many places lie between queries and keys; queries are the last places of the keys."""
    shift = x.shape.K - x.shape.Q
    away = (block.queries[:, None] + shift - block.keys).abs()
    return away.to(block.weights.dtype)


def _edges(x: AttentionInputs) -> tuple[Int[Tensor, "q"], Int[Tensor, "q"]]:
    """The keys [start, stop) that each query can see at most."""
    outline = None if x.mask is None else outline_of(x.mask)
    if outline is None:
        nothing = torch.zeros(x.shape.Q, dtype=torch.long, device=x.q.device)
        return nothing, nothing + x.shape.K
    return band_edges(outline.band, x.shape, x.q.device)
