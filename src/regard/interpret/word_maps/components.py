"""Connected regions of a grid, and peaks that stand apart."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import max_pool3d

from regard.errors import RegardError

Connected = Literal[4, 8]
"""Cells that touch by their sides, or by their corners too. Over frames a cell touches the same
cell of the frame before and after (6 neighbours), or all nine around it (26)."""


def labelled(
    inside: Bool[Tensor, "*many frames height width"], connected: Connected = 8
) -> Int[Tensor, "*many frames height width"]:
    """A number for each cell inside, the same for cells that are connected; 0 outside.

    Written here because SciPy, whose `ndimage.label` does it, is not required. A cell begins with a
    number of its own, takes the largest of its neighbours', and then the number that the cell has
    which that number belongs to: regions agree after a logarithm of rounds, not one for each cell
    of a winding path.

    >>> labelled(torch.tensor([[[True, False], [False, True]]]), 4).tolist()
    [[[1, 0], [0, 4]]]
    >>> labelled(torch.tensor([[[True, False], [False, True]]]), 8).tolist()
    [[[4, 0], [0, 4]]]
    """
    if connected not in (4, 8):
        raise RegardError(
            "connected= counts the neighbours of a cell", got=repr(connected), accepted="4 or 8"
        )
    shape = inside.shape
    cells = inside.reshape(-1, *shape[-3:])
    every = cells[0].numel()
    own = torch.arange(1, every + 1, device=inside.device).reshape(shape[-3:])
    labels = torch.where(cells, own, 0)
    while True:
        spread = torch.where(cells, _largest_around(labels, connected), 0)
        # Place 0 stands for outside, so that labels are places.
        known = torch.nn.functional.pad(spread.flatten(1), (1, 0))
        spread = known.gather(1, spread.flatten(1)).reshape(spread.shape)
        if torch.equal(spread, labels):
            return labels.reshape(shape)
        labels = spread


def _largest_around(
    labels: Int[Tensor, "n frames height width"], connected: Connected
) -> Int[Tensor, "n frames height width"]:
    if connected == 4:
        return torch.stack([_largest_along(labels, dim) for dim in (1, 2, 3)]).amax(0)
    # A cube is a line of squares, and a square a line of lines.
    for dim in (1, 2, 3):
        labels = _largest_along(labels, dim)
    return labels


def _largest_along(labels: Tensor, dim: int) -> Tensor:
    """Of each cell and the two beside it."""
    many = labels.shape[dim] - 1
    found = labels.clone()
    before, after = found.narrow(dim, 1, many), found.narrow(dim, 0, many)
    torch.maximum(before, labels.narrow(dim, 0, many), out=before)
    torch.maximum(after, labels.narrow(dim, 1, many), out=after)
    return found


def sizes(labels: Int[Tensor, "frames height width"]) -> dict[int, int]:
    """How many cells each region has, by its number."""
    found, counts = labels[labels > 0].unique(return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def peaks(
    values: Float[Tensor, "frames height width"], distance: float
) -> list[tuple[int, int, int]]:
    """Cells that are larger than all around them, the largest first; of two that are less than
    `distance` apart, the larger.

    >>> peaks(torch.tensor([[[0.0, 3.0, 0.0, 2.0]]]), distance=2)
    [(0, 0, 1), (0, 0, 3)]
    >>> peaks(torch.tensor([[[0.0, 3.0, 0.0, 2.0]]]), distance=3)
    [(0, 0, 1)]
    """
    # What lies as low as anything is no peak, though nothing around it may be higher.
    top = max_pool3d(values[None].double(), 3, 1, 1)[0]
    found = ((values.double() == top) & (values > values.min())).nonzero()
    order = values[tuple(found.unbind(1))].argsort(descending=True, stable=True)
    kept: list[tuple[int, int, int]] = []
    places = found[order].tolist()
    for frame, row, column in places:
        near = (
            (frame - f) ** 2 + (row - r) ** 2 + (column - c) ** 2 < distance**2 for f, r, c in kept
        )
        if not any(near):
            kept.append((frame, row, column))
    return kept
