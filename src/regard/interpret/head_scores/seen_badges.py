"""One word for each head from what was seen of one text: for views of traces without a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regard.interpret.head_scores.pairs.pair_sums import call_sums
from regard.interpret.head_scores.tables.badge_rules import Held, badge_of
from regard.interpret.head_scores.tally import ratio
from regard.interpret.head_scores.texts.sides import Side, Sides
from regard.interpret.interventions.intervention import observed
from regard.scores.comparison import Dot
from regard.seen import Layer
from regard.traces import Chosen, Trace

FEWEST = 8
"""Rows from which on a score of one text counts."""


@torch.no_grad()
def badges(
    seen: Mapping[str, Layer], tokens: Sequence[str] | None = None
) -> dict[str, tuple[str, ...]]:
    """By the path of a layer, a word for each of its heads, or none, as `HeadScores.badges` gives
    them over many texts. For one text they come from the same scores, compared with those of
    uniform attention; a word needs eight rows that can show it. Layers without traces have none.

    `tokens` are those of the text, as `seen.tokens` has them. Where they are not known, words that
    depend on tokens are not given.

    >>> import regard
    >>> x = torch.eye(12)[None, None]
    >>> layer = Layer("attn")
    >>> one = regard.trace(60 * x.roll(-1, -1), x, x, mask=regard.masks.causal())
    >>> layer.take(one, 0, keep=True)
    >>> badges({"attn": layer}, list("abcdefghijkl"))
    {'attn': ('previous',)}
    """
    found = {}
    for path, layer in seen.items():
        if len(layer.traces):
            found[path] = tuple(map(badge_of, _scores(layer, tokens)))
    return found


def _scores(layer: Layer, tokens: Sequence[str] | None) -> list[dict[str, Held]]:
    mine: dict[str, Tensor] = {}
    alike: dict[str, Tensor] = {}
    for trace in layer.traces:
        _add(mine, trace, tokens)
        if isinstance(trace.inputs.comparison, Dot):
            _add(alike, _uniform(trace), tokens)
    usual = {name: float(ratio(both)[0]) for name, both in alike.items()}
    each = {
        name: ratio(both).tolist()
        for name, both in mine.items()
        if float(both[:, 1].max()) >= FEWEST
    }
    return [
        {name: Held(of[head], usual.get(name, math.nan)) for name, of in each.items()}
        for head in range(layer.heads)
    ]


def _add(totals: dict[str, Tensor], trace: Trace, tokens: Sequence[str] | None) -> None:
    """The scores of a call: for each head what is divided, and by what."""
    B, _, Q, K = trace.inputs.shape
    device = trace.inputs.q.device
    query, key = (Side.of_places(B, n, device) for n in (Q, K))
    own = tokens is not None and len(tokens) == K and Q <= K
    if own:
        assert tokens is not None
        numbers = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
        ids = torch.tensor([[numbers[token] for token in tokens]], device=device).expand(B, -1)
        query, key = Side(query.real, ids[:, K - Q :]), Side(key.real, ids)
    sums = call_sums(trace, Sides(query, key, own or Q == K))
    every = {name: torch.stack(both, -1).sum(0).cpu() for name, both in sums.scores.items()}
    if own:
        assert tokens is not None
        marks = [i for i, t in enumerate(tokens) if i and not any(c.isalnum() for c in t)]
        assert sums.received is not None
        given = sums.received[..., marks].sum(-1)
        every["separator"] = torch.stack([given, sums.rows], -1).sum(0).cpu()
    for name, both in every.items():
        totals[name] = totals[name] + both if name in totals else both


def _uniform(trace: Trace) -> Trace:
    """A head that gives all keys it may see the same."""
    every: list[Chosen] = [slice(None)] * max(len(trace.inputs.lead), 1)
    one = trace.detach()[(*every, [0])]
    inputs = replace(one.inputs, q=torch.zeros_like(one.inputs.q), bias=None, sink=None)
    return replace(one, inputs=inputs, rows=observed(inputs))
