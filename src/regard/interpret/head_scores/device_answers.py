"""What devices are asked, and waited for once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor


def answers(asked: Sequence[Bool[Tensor, ""]]) -> list[bool]:
    """Yes or no to each of several questions.

    >>> answers([torch.tensor(1) > 0, torch.tensor(1) > 2])
    [True, False]
    """
    if not asked:
        return []
    told: list[bool] = torch.stack([each.to(asked[0].device) for each in asked]).tolist()
    return told
