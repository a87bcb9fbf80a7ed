"""Numbers of keys, such as 1 for rare ones: a score is their sum, weighted by the attention that
keys get. Where a backend mixes them beside the values, the forward pass gives these sums."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from regard.biases.dense import Dense
from regard.inputs import AttentionInputs
from regard.interpret.head_scores.pairs.weight_blocks import apart, looks_back
from regard.interpret.head_scores.texts.sides import Sides

Numbers = Mapping[str, Shaped[Tensor, "b #h k"]]
"""By name, of each key, the same for all heads or for each its own."""
FIRST, PLACE = "first key", "place"
MOST = 65_504
"""The largest place that two numbers of either half precision represent exactly."""


def can_be_weighed(x: AttentionInputs, sides: Sides) -> bool:
    """Whether sums over all rows are enough: no row may see padding or later keys."""
    return (
        sides.own
        and x.sink is None
        and not isinstance(x.bias, Dense)
        and x.shape.K <= MOST
        and not apart(x)
        and looks_back(x)
        and not sides.query.padded
        and not sides.key.padded
    )


def beside(
    x: AttentionInputs, sides: Sides, numbers: Numbers
) -> tuple[tuple[str, ...], Float[Tensor, "b h k c"]]:
    """Names of columns and the columns: those that every call needs, and `numbers`."""
    names = (PLACE, FIRST, *numbers)
    shared = [name for name in numbers if numbers[name].shape[1] == 1]

    def same_for_all_heads() -> Tensor:
        B, H, _, K = x.shape
        place = torch.arange(K, device=x.q.device)
        columns = torch.zeros(B, H, K, len(names), device=x.q.device)
        columns[..., 0] = place
        columns[..., 1] = (place == sides.key.first[:, None])[:, None]
        for name in shared:
            columns[..., names.index(name)] = numbers[name]
        return columns

    columns = sides.key.counted(f"columns {names}", x, same_for_all_heads).clone()
    for name in numbers:
        if name not in shared:
            columns[..., names.index(name)] = numbers[name]
    return names, columns
