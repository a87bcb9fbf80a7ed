"""The pair that a tour begins with by default."""

from __future__ import annotations

import torch

from regard.errors import RegardError
from regard.view.atlas.maps import Map

SHORT = 2048
"""Of texts that are not longer, all queries are asked; of others the last."""
MANY = 4


@torch.no_grad()
def shown_pair(of: Map, head: int, query: int | None = None) -> tuple[int, int]:
    """The strongest pair of a head, or of one of its queries. The first token, on which heads rest,
    and a token's look at itself count only where there is nothing else.

    >>> import regard, torch
    >>> from regard.view.atlas import Atlas
    >>> weights = torch.tensor([[1.0, 0, 0], [0.9, 0.1, 0], [0.6, 0.3, 0.1]])
    >>> shown_pair(Atlas.of(weights)[0], 0)
    (2, 1)
    """
    _, Q, K = of.shape
    if not (Q and K):
        raise RegardError("there is no pair to tell about", got=f"{Q} queries, {K} keys")
    if query is None and Q <= SHORT:
        values, keys = of.top(head, min(MANY, K))
        rows = torch.arange(Q)
    else:
        row = Q - 1 if query is None else query
        values, keys = of.weights(head, [row], range(K)).nan_to_num(0.0).topk(min(MANY, K))
        rows = torch.tensor([row])
    rest = keys == 0
    if Q == K:
        rest |= keys == rows[:, None]
    # What rests counts less than anything else, and more than nothing.
    worth = torch.where(rest, values * 1e-6, values)
    best = int(worth.argmax())
    row, place = divmod(best, values.shape[1])
    return int(rows[row]), int(keys[row, place])
