"""A model that learned nothing: what scores are held against."""

from __future__ import annotations

import copy

import torch
from torch import nn

FEW = 32
"""Texts that such a model reads, at most: it has nothing to say about any of them in particular."""


def shuffled(model: nn.Module, seed: int = 0) -> tuple[nn.Module | None, str]:
    """A copy in which the numbers of every parameter stand in random order; or None, and why.

    Shapes, scales and what is tied stay as they are, whatever the model is, and what it learned is
    gone. Parameters of one number, and those that are no floating-point numbers, stay.

    >>> model = nn.Linear(3, 2)
    >>> other, _ = shuffled(model)
    >>> torch.equal(other.weight.flatten().sort().values, model.weight.flatten().sort().values)
    True
    """
    try:
        other = copy.deepcopy(model)
    except Exception as error:  # whatever a model holds that cannot be copied
        return None, f"the model cannot be copied ({type(error).__name__})"
    matrices = [p for p in other.parameters() if p.is_floating_point() and p.numel() > 1]
    numbers = sum(p.numel() for p in matrices)
    every = sum(p.numel() for p in other.parameters()) + sum(
        b.numel() for b in other.buffers() if not b.is_floating_point() and b.ndim > 1
    )
    if 2 * numbers < every or not numbers:
        return None, "most of the model's weights are quantized: they are not shuffled"
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in matrices:
            order = torch.randperm(p.numel(), generator=draw).to(p.device)
            p.copy_(p.flatten()[order].view_as(p))
    return other.eval(), ""
