"""Zachary's karate club: who was friends with whom, and which leader each followed."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
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
