"""Digits drawn by a pen that is never held twice the same way: pictures that need no download."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

SIDE = 24
"""Pixels of a picture."""


def _arc(x: float, y: float, wide: float, high: float, start: int, stop: int) -> list[list[float]]:
    """Points on an ellipse, from one angle to another, in degrees."""
    turns = [math.radians(start + (stop - start) * i / 10) for i in range(11)]
    return [[x + wide * math.cos(t), y + high * math.sin(t)] for t in turns]


# In a square from -1 to 1, x to the right and y down; a list for each time the pen is put down.
STROKES: dict[int, list[list[list[float]]]] = {
    0: [_arc(0, 0, 0.6, 0.9, 0, 360)],
    1: [[[-0.35, -0.5], [0.05, -0.9], [0.05, 0.9]]],
    2: [[*_arc(0, -0.4, 0.55, 0.5, -170, 40), [-0.55, 0.9], [0.6, 0.9]]],
    3: [_arc(-0.05, -0.45, 0.5, 0.45, -150, 90), _arc(-0.05, 0.45, 0.6, 0.45, -90, 150)],
    4: [[[0.25, 0.9], [0.25, -0.9], [-0.6, 0.35], [0.65, 0.35]]],
    5: [[[0.5, -0.9], [-0.4, -0.9], [-0.45, -0.05], *_arc(-0.05, 0.35, 0.55, 0.55, -120, 150)]],
    6: [[[0.35, -0.9], [-0.35, 0.0], *_arc(0, 0.4, 0.5, 0.5, 180, 540)]],
    7: [[[-0.6, -0.9], [0.6, -0.9], [-0.1, 0.9]]],
    8: [_arc(0, -0.45, 0.42, 0.42, 0, 360), _arc(0, 0.45, 0.52, 0.45, 0, 360)],
    9: [_arc(0, -0.35, 0.5, 0.5, 0, 360), [[0.5, -0.35], [0.3, 0.9]]],
}


def draw(count: int) -> tuple[Float[Tensor, "b s s"], Int[Tensor, "b"]]:
    """Pictures from 0 (paper) to 1 (ink), and the digit on each.

    >>> pictures, digits = draw(3)
    >>> pictures.shape, digits.shape, bool((pictures.amax((1, 2)) > 0.9).all())
    (torch.Size([3, 24, 24]), torch.Size([3]), True)
    """
    digits = torch.randint(10, (count,))
    pictures = torch.zeros(count, SIDE, SIDE)
    for digit, strokes in STROKES.items():
        mine = (digits == digit).nonzero().squeeze(1)
        if len(mine):
            pictures[mine] = _inked(_held(strokes, len(mine)))
    return (pictures + 0.08 * torch.rand_like(pictures)).clamp(0, 1), digits


def _held(strokes: list[list[list[float]]], count: int) -> list[Float[Tensor, "b _ 2"]]:
    """The strokes turned, slanted, stretched, put somewhere and shaken, differently each time."""
    turn, slant = 0.2 * torch.randn(count), 0.15 * torch.randn(count)
    size = 5.5 + 2.5 * torch.rand(count, 2)
    centre = SIDE / 2 - 0.5 + (torch.rand(count, 2) - 0.5) * 6
    cos, sin = turn.cos(), turn.sin()
    rotated = torch.stack([torch.stack([cos, slant - sin], 1), torch.stack([sin, cos], 1)], 1)
    held = []
    for stroke in strokes:
        points = torch.tensor(stroke) @ rotated.mT * size[:, None] + centre[:, None]
        held.append(points + 0.25 * torch.randn_like(points))
    return held


def _inked(strokes: list[Float[Tensor, "b _ 2"]]) -> Float[Tensor, "b s s"]:
    """Ink where a pixel is near a line between two points."""
    count = strokes[0].shape[0]
    place = torch.arange(SIDE).float()
    pixels = torch.stack(torch.meshgrid(place, place, indexing="xy"), -1)[None, :, :, None]
    thick = 0.7 + 0.5 * torch.rand(count, 1, 1)
    nearest = torch.full((count, SIDE, SIDE), float("inf"))
    for points in strokes:
        start, stop = points[:, None, None, :-1], points[:, None, None, 1:]
        along = stop - start
        share = ((pixels - start) * along).sum(-1) / along.square().sum(-1).clamp(min=1e-6)
        on_line = start + share.clamp(0, 1)[..., None] * along
        nearest = nearest.minimum((pixels - on_line).norm(dim=-1).amin(-1))
    return (1.5 - (nearest - thick).clamp(0, 1.5)) / 1.5
