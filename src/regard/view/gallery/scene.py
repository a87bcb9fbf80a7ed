"""A picture whose patches are compared by their colours: nothing is learned."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from regard import masks
from regard.calls.dispatch import trace
from regard.view.atlas import Atlas, Patches

COLOUR = "colour"
"""The name that stands for no model: patches are compared by their colours."""
GRID, PATCH = 12, 8
SHARP = 4.0
"""By what cosines are multiplied: patches of one colour stand out, and no more."""


def compared() -> Atlas:
    """The picture, each patch of which looks at those that are coloured like it."""
    picture = drawn()
    x = features(picture)
    t = trace(x, x, x, mask=~masks.window(0), scale=SHARP)
    atlas = Atlas.of(t, Patches(picture, grid=(GRID, GRID)))
    atlas.model = COLOUR
    return atlas


def features(picture: Float[Tensor, "3 h w"]) -> Float[Tensor, "n d"]:
    """A vector of length 1 for each patch: its mean colour, against that of the whole picture."""
    patches = picture.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    colours = patches.flatten(3).mean(-1).flatten(1).mT
    return normalize(colours - colours.mean(0), dim=-1)


def drawn() -> Float[Tensor, "3 h w"]:
    """A sun and a tree over a meadow, from 0 to 1."""
    side = GRID * PATCH
    at = (torch.arange(side) + 0.5) / side
    down, across = at[:, None], at[None, :]
    meadow = down > 0.72 + 0.04 * torch.sin(5 * across)
    sun = (down - 0.21) ** 2 + (across - 0.79) ** 2 < 0.12**2
    trunk = ((across - 0.29).abs() < 0.03) & (down > 0.5) & (down < 0.86)
    crown = (down - 0.46) ** 2 + (across - 0.29) ** 2 < 0.17**2
    sky = torch.stack([0.45 + 0.3 * down, 0.65 + 0.15 * down, 0.95 - 0.1 * down])
    picture = sky.expand(3, side, side).clone()
    for where, colour in (
        (meadow, (0.36, 0.58, 0.28)),
        (sun, (1.0, 0.85, 0.3)),
        (trunk, (0.4, 0.26, 0.14)),
        (crown, (0.13, 0.38, 0.18)),
    ):
        picture = torch.where(where, torch.tensor(colour)[:, None, None], picture)
    return picture
