"""Maps of layers that see the picture at different resolutions, on one grid."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from regard.errors import RegardError

Resize = Literal["area", "bilinear"]


def resized(
    maps: Float[Tensor, "*many height width"], grid: tuple[int, int], how: Resize = "area"
) -> Float[Tensor, "*many rows columns"]:
    """Maps on another grid, with the mean that they had: a word has the same share of the picture
    whatever the resolution of a layer.

    "area": each new cell is the mean of the old ones under it, by the area that they share.
    "bilinear": between the centres of cells, then scaled to the mean of the map.

    >>> resized(torch.tensor([[0.0, 4.0]]), (1, 3))
    tensor([[0., 2., 4.]])
    """
    if how not in ("area", "bilinear"):
        raise RegardError(
            "resize= says how maps are brought to one grid",
            got=repr(how),
            accepted='"area" or "bilinear"',
        )
    height, width = maps.shape[-2:]
    if (height, width) == grid:
        return maps
    if how == "area":
        down, across = (
            _overlap(old, new).to(maps) for old, new in ((height, grid[0]), (width, grid[1]))
        )
        return down @ maps @ across.mT
    flat = maps.reshape(-1, 1, height, width)
    made = interpolate(flat, grid, mode="bilinear", align_corners=False, antialias=True)
    means = (flat.mean((-2, -1), keepdim=True), made.mean((-2, -1), keepdim=True))
    made = made * torch.where(means[1] > 0, means[0] / means[1], 1.0)
    return made.reshape(*maps.shape[:-2], *grid)


def _overlap(old: int, new: int) -> Float[Tensor, "new old"]:
    """How much of each new cell lies over each old one."""
    ends = torch.arange(new + 1, dtype=torch.float64) / new
    starts = torch.arange(old + 1, dtype=torch.float64) / old
    high = torch.minimum(ends[1:, None], starts[None, 1:])
    low = torch.maximum(ends[:-1, None], starts[None, :-1])
    return (high - low).clamp(min=0) * new
