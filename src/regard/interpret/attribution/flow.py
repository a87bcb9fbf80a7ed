"""Attention flow: how much could come from a token to a row, if edges carried at most their weight.

Layers are a network: from place i above to place j below runs an edge of capacity Ã_ij, as in
rollout. The flow of a token is the largest that gets from the row to it. (Abnar and Zuidema, 2020.)
Paths share edges, so it is a search for each token, and for short texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import RegardError
from regard.interpret.attribution.rollout import mean_of_heads, refuse_other_places
from regard.traces import Trace

LARGEST = 2**16
"""Edges of the largest network."""
NOTHING = 1e-12
"""Capacities below are none: what rounding leaves."""


def flow(
    traces: Sequence[Trace],
    queries: Int[Tensor, "r"],
    progress: Callable[[int, int], None] | None = None,
) -> Float[Tensor, "b r k"]:
    """The flows of all tokens to some rows, first layer first."""
    B, _, n, _ = refuse_other_places(traces)
    if len(traces) * n * n > LARGEST:
        raise RegardError(
            "attention flow searches a network for each token, which takes long for a long text",
            got=f"{len(traces)} layers of {n} × {n} edges",
            accepted=f"{LARGEST} edges at most",
            do='shorten the text, name fewer layers in layers=, or use method="rollout"',
        )
    found = torch.zeros(B, len(queries), n, dtype=traces[0].inputs.compute_dtype)
    every = torch.arange(n, device=queries.device)
    mixing = torch.stack([mean_of_heads(t, every) for t in traces])
    mixing = mixing + torch.eye(n).to(mixing)
    mixing = mixing / mixing.sum(-1, keepdim=True)
    for b in range(B):
        network = _Network(mixing[:, b].flip(0).tolist())
        for r, query in enumerate(queries.tolist()):
            for key in range(n):
                found[b, r, key] = network.largest(query, len(traces) * n + key)
            if progress is not None:
                progress(b * len(queries) + r + 1, B * len(queries))
    return found.to(queries.device)


class _Network:
    """Places of layers, from above, and what edges between them carry. (Dinic's algorithm.)"""

    def __init__(self, layers: list[list[list[float]]]) -> None:
        n = len(layers[0])
        self.out: list[list[int]] = [[] for _ in range((len(layers) + 1) * n)]
        self.to: list[int] = []
        self.capacities: list[float] = []
        for above, layer in enumerate(layers):
            for i, row in enumerate(layer):
                for j, capacity in enumerate(row):
                    if capacity > NOTHING:
                        self._edge(above * n + i, (above + 1) * n + j, capacity)

    def _edge(self, start: int, end: int, capacity: float) -> None:
        # An edge and its way back stand side by side: edge e's is e ^ 1.
        for one, other, room in ((start, end, capacity), (end, start, 0.0)):
            self.out[one].append(len(self.to))
            self.to.append(other)
            self.capacities.append(room)

    def largest(self, start: int, end: int) -> float:
        """The largest flow from one place to another."""
        room, total = list(self.capacities), 0.0
        while True:
            depth = self._depths(start, end, room)
            if depth[end] < 0:
                return total
            total += self._pushed(start, end, room, depth)

    def _depths(self, start: int, end: int, room: list[float]) -> list[int]:
        depth = [-1] * len(self.out)
        depth[start] = 0
        waiting = deque([start])
        while waiting and depth[end] < 0:
            at = waiting.popleft()
            for edge in self.out[at]:
                if room[edge] > NOTHING and depth[self.to[edge]] < 0:
                    depth[self.to[edge]] = depth[at] + 1
                    waiting.append(self.to[edge])
        return depth

    def _pushed(self, start: int, end: int, room: list[float], depth: list[int]) -> float:
        """As much as shortest paths take, one after another."""
        tried, total = [0] * len(self.out), 0.0
        path: list[int] = []
        at = start
        while True:
            if at == end:
                carried = min(room[edge] for edge in path)
                total += carried
                for edge in path:
                    room[edge] -= carried
                    room[edge ^ 1] += carried
                full = next(i for i, edge in enumerate(path) if room[edge] <= NOTHING)
                at = self.to[path[full] ^ 1]
                del path[full:]
                continue
            onwards = self._next(at, room, depth, tried)
            if onwards is not None:
                path.append(onwards)
                at = self.to[onwards]
            elif path:
                at = self.to[path.pop() ^ 1]
                tried[at] += 1
            else:
                return total

    def _next(self, at: int, room: list[float], depth: list[int], tried: list[int]) -> int | None:
        while tried[at] < len(self.out[at]):
            edge = self.out[at][tried[at]]
            if room[edge] > NOTHING and depth[self.to[edge]] == depth[at] + 1:
                return edge
            tried[at] += 1
        return None
