"""Which keys a cache can do without, by the attention they got.

Query heads that share a key head share its verdict: scores and places are per key head, as the
cache is.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from regard.arguments import described
from regard.errors import RegardError
from regard.interpret.kept_positions import Kept, strongest
from regard.interpret.rows import received_from
from regard.traces import Trace
from regard.values import whole


def heavy_hitters(trace: Trace, keep: int, *, recent: int) -> Kept:
    """Keep so many keys: the `recent` last ones, and of the others those that got most attention
    from all queries together, as H2O has it.

    `scores` are [B, G, K] for G key heads, `keep` the places that stay, [B, G, keep], in order.
    Never n×n: the sums are the trace's own. A key that has been there for longer has had more
    queries to get attention from; `window_votes` does not have that bias.

    >>> import torch, regard
    >>> q, k = torch.ones(1, 2, 8, 4), torch.zeros(1, 1, 8, 4)
    >>> k[..., 3, :] = 2.0                                          # everybody looks at place 3
    >>> heavy_hitters(regard.trace(q, k, k, mask=regard.masks.causal()), 4, recent=2).keep
    tensor([[[0, 3, 6, 7]]])
    """
    refuse_no_trace(trace)
    K = trace.inputs.shape.K
    _check(keep, recent, "recent", K)
    return _keep(_by_key_head(trace, received_from(trace, None, None)), keep, recent, K)


def window_votes(
    trace: Trace,
    keep: int,
    *,
    window: int = 32,
    pool: Literal["max", "mean"] = "max",
    width: int = 7,
) -> Kept:
    """Keep so many keys: the last `window`, and of the others those that the last `window` queries
    look at most, as SnapKV has it.

    Scores are pooled over `width` neighbours, so that what surrounds a key stays with it. `scores`
    are [B, G, K - window] for G key heads, `keep` the places that stay, [B, G, keep], in order.
    Only the rows of the window are computed.

    >>> import torch, regard
    >>> q, k = torch.ones(1, 2, 8, 4), torch.zeros(1, 1, 8, 4)
    >>> k[..., 3, :] = 2.0
    >>> t = regard.trace(q, k, k, mask=regard.masks.causal())
    >>> window_votes(t, 5, window=2, width=3).keep                   # place 3 and its neighbours
    tensor([[[2, 3, 4, 6, 7]]])
    """
    refuse_no_trace(trace)
    _, _, Q, K = trace.inputs.shape
    _check(keep, window, "window", K)
    if not 1 <= window <= Q:
        raise RegardError(
            "window= counts the last queries, which choose",
            got=f"{window}, with {Q} queries",
            accepted=f"1 to {Q}",
            do="use a trace of the prompt; while generating, each call has one query",
        )
    if whole("width=", width) < 1 or width % 2 != 1 or pool not in ("max", "mean"):
        raise RegardError(
            "scores are pooled over neighbours",
            got=f"pool={pool!r}, width={width}",
            accepted="pool 'max' or 'mean', and an odd width",
        )
    votes = received_from(trace, range(Q - window, Q), range(K - window))
    scores = _by_key_head(trace, votes)
    if window < K:
        pooled = max_pool1d if pool == "max" else avg_pool1d
        scores = pooled(scores, width, stride=1, padding=width // 2)
    return _keep(scores, keep, window, K)


def _by_key_head(trace: Trace, scores: Float[Tensor, "b h k"]) -> Float[Tensor, "b g k"]:
    grouped: Tensor = scores.unflatten(1, (-1, trace.inputs.group))
    return grouped.sum(2)


def _keep(scores: Float[Tensor, "b g scored"], keep: int, last: int, K: int) -> Kept:
    places = torch.arange(K, device=scores.device)
    old = scores[..., : K - last]
    found = strongest(old, keep - last, places[: K - last], places[K - last :])
    return found._replace(scores=scores)


def _check(keep: int, last: int, name: str, K: int) -> None:
    if not 0 <= whole(f"{name}=", last) <= whole("keep=", keep) <= K:
        raise RegardError(
            f"keep= counts the keys that stay, and the last {name}= are among them",
            got=f"keep={keep}, {name}={last}, with {K} keys",
            accepted=f"0 <= {name} <= keep <= {K}",
        )


def refuse_no_trace(trace: object) -> None:
    """Unless it is one."""
    if not isinstance(trace, Trace):
        raise RegardError(
            "keys are scored by a trace", got=described(trace), accepted="what regard.trace gives"
        )
