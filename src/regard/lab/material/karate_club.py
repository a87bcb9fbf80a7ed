"""Zachary's karate club: who was friends with whom, and which leader each followed."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MEMBERS = 34
FRIENDS = {
    0: (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 17, 19, 21, 31), 1: (2, 3, 7, 13, 17, 19, 21, 30),
    2: (3, 7, 8, 9, 13, 27, 28, 32), 3: (7, 12, 13), 4: (6, 10), 5: (6, 10, 16), 6: (16,),
    8: (30, 32, 33), 9: (33,), 13: (33,), 14: (32, 33), 15: (32, 33), 18: (32, 33), 19: (33,),
    20: (32, 33), 22: (32, 33), 23: (25, 27, 29, 32, 33), 24: (25, 27, 31), 25: (31,),
    26: (29, 33), 27: (33,), 28: (31, 33), 29: (32, 33), 30: (32, 33), 31: (32, 33), 32: (33,),
}  # fmt: skip
"""Zachary, An information flow model for conflict and fission in small groups, 1977."""
OFFICERS = {9, 14, 15, 18, 20, 22, *range(23, 34)}
"""Who followed the second leader when the club split."""


def friendships() -> Bool[Tensor, "m m"]:
    """Who knows whom, everyone themselves included.

    >>> table = friendships()
    >>> int(table.sum() - 34) // 2, bool((table == table.T).all())
    (78, True)
    """
    table = torch.eye(MEMBERS, dtype=torch.bool)
    for one, others in FRIENDS.items():
        table[one, list(others)] = table[list(others), one] = True
    return table


def sides() -> Int[Tensor, "m"]:
    """The leader each followed: 0 or 1.

    >>> sides().bincount().tolist()
    [17, 17]
    """
    return torch.tensor([int(member in OFFICERS) for member in range(MEMBERS)])


def places(pulls: int = 200) -> Float[Tensor, "m 2"]:
    """Where members are drawn: friends pull each other, all push (Fruchterman and Reingold, 1991).

    >>> found = places()
    >>> bool(found[0, 0] < 0 < found[33, 0]), float(found.abs().max()) <= 1
    (True, True)
    """
    known = friendships().double()
    side = 2.0 * sides().double() - 1
    turn = torch.arange(MEMBERS).double() * 2.4
    at = torch.stack([0.5 * side + 0.5 * turn.cos(), turn.sin()], 1)
    near = 1.2 / MEMBERS**0.5
    for i in range(pulls):
        apart = at[:, None] - at
        far = apart.norm(dim=-1, keepdim=True).clamp_min(0.01)
        pull = apart / far * (near**2 / far - known[..., None] * far**2 / near)
        move = pull.sum(1)
        size = move.norm(dim=-1, keepdim=True).clamp_min(1e-9)
        at = at + move / size * size.clamp(max=0.1 * (1 - i / pulls))
    at = at - at.mean(0)
    return at / at.abs().max()
