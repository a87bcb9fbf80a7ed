"""One word for each head from what was seen of one text: for views of traces without a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from regard.interpret.head_scores.badge_rules import Held, badge_of
from regard.interpret.head_scores.pair_sums import call_sums
from regard.interpret.head_scores.sides import Side, Sides
from regard.interpret.head_scores.tally import ratio
from regard.seen import Layer


@torch.no_grad()
def badges(
    seen: Mapping[str, Layer], tokens: Sequence[str] | None = None
) -> dict[str, tuple[str, ...]]:
    """By the path of a layer, a word for each of its heads, or none, as `HeadScores.badges` gives
    them over many texts. Of one text they are told by the same scores, without a comparison with
    random weights; of layers without traces there are none.

    `tokens` are those of the text, as `seen.tokens` has them. Where they are not known, words that
    depend on tokens are not given.

    >>> import regard
    >>> x = torch.eye(6)[None, None]
    >>> layer = Layer("attn")
    >>> one = regard.trace(60 * x.roll(-1, -1), x, x, mask=regard.masks.causal())
    >>> layer.take(one, 0, keep=True)
    >>> badges({"attn": layer}, list("abcdef"))
    {'attn': ('previous',)}
    """
    found = {}
    for path, layer in seen.items():
        if len(layer.traces):
            found[path] = tuple(map(badge_of, _scores(layer, tokens)))
    return found


def _scores(layer: Layer, tokens: Sequence[str] | None) -> list[dict[str, Held]]:
    totals: dict[str, torch.Tensor] = {}
    for trace in layer.traces:
        B, _, Q, K = trace.inputs.shape
        device = trace.inputs.q.device
        own = tokens is not None and len(tokens) == K and Q <= K
        query, key = (Side.of_places(B, n, device) for n in (Q, K))
        if own:
            assert tokens is not None
            numbers = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
            ids = torch.tensor([[numbers[token] for token in tokens]], device=device).expand(B, -1)
            query, key = Side(query.real, ids[:, K - Q :]), Side(key.real, ids)
        sums = call_sums(trace, Sides(query, key, own or Q == K))
        every = {name: torch.stack(both, -1).sum(0) for name, both in sums.scores.items()}
        if own:
            assert tokens is not None
            marks = [i for i, t in enumerate(tokens) if i and not any(c.isalnum() for c in t)]
            given = sums.received[..., marks].sum(-1)
            every["separator"] = torch.stack([given, sums.rows], -1).sum(0)
        for name, both in every.items():
            totals[name] = totals[name] + both if name in totals else both
    heads = layer.heads
    each = {name: ratio(both).tolist() for name, both in totals.items()}
    return [
        {name: Held(values[h], math.nan) for name, values in each.items()} for h in range(heads)
    ]
