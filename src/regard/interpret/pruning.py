"""Which image tokens a vision-language model can do without, by the attention they get."""

from __future__ import annotations

import math

import torch

from regard.arguments import described, is_number
from regard.errors import RegardError
from regard.interpret.eviction import refuse_no_trace
from regard.interpret.kept_positions import Kept, strongest
from regard.interpret.rows import received_from
from regard.traces import Chosen, Trace, places


def prune(trace: Trace, tokens: Chosen, share: float, *, queries: Chosen = -1) -> Kept:
    """Score some tokens by the attention they get, and keep a share of them, and all others.

    `tokens` are places of keys, for example `input_ids[0] == image_token_id`. The score is the mean
    over heads and `queries`: by default the last one, as FastV has it; `range(n, Q)` for all text
    after an image that ends at n; None for every query, as FastV's paper has it. `trace` is that of
    an early layer, after which the tokens are dropped. `scores` is [B, tokens], `keep` the places
    of the sequence that stay, [B, N], in order: one gather prunes the hidden states.

    >>> import torch, regard
    >>> image = range(2, 8)
    >>> k = torch.zeros(1, 1, 10, 4)
    >>> k[0, 0, [3, 6], 0] = 5.0                                   # two patches that stand out
    >>> t = regard.trace(torch.ones(1, 1, 10, 4), k, k, mask=regard.masks.causal())
    >>> prune(t, image, 1 / 3).keep
    tensor([[0, 1, 3, 6, 8, 9]])
    """
    refuse_no_trace(trace)
    _, H, Q, K = trace.inputs.shape
    device = trace.inputs.q.device
    chosen = places(tokens, K, "tokens", device)
    if not (is_number(share) and 0 <= share <= 1):
        raise RegardError(
            "share= is how much of the tokens stays", got=described(share), accepted="0 to 1"
        )
    if len(chosen.unique()) < len(chosen):
        raise RegardError("tokens= names a token twice", got=f"{tokens!r:.80}")
    rows = Q if queries is None else len(places(queries, Q, "queries", device))
    if not rows:
        raise RegardError("there must be a query to score tokens by", got=str(queries))
    scores = received_from(trace, queries, chosen).sum(1) / (H * rows)
    others = torch.ones(K, dtype=torch.bool, device=device)
    others[chosen] = False
    # Of 100 tokens 0.07 are 7, where the product is a little more.
    many = math.ceil(share * len(chosen) - 1e-9)
    return strongest(scores, many, chosen, others.nonzero()[:, 0])
