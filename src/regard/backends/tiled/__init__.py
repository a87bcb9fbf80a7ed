"""Attention in plain PyTorch, tile by tile: any device, every feature, O(n) memory."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Rows, Work
from regard.backends.tiled.fused import (
    fused_pairs,
    fused_size,
    fusing,
    outruns_pytorch,
    scratch_numbers,
)
from regard.backends.tiled.inner_loop import described
from regard.backends.tiled.operators import run
from regard.backends.tiled.second_pass import TiledPass
from regard.backends.tiled.walk import KEY_TILE, tile_size
from regard.cost.counting import visited_pairs
from regard.inputs import AttentionInputs

__all__ = ["Tiled", "TiledPass", "outruns_pytorch"]


class Tiled:
    name = "tiled"
    observes = True

    def refuses(self, inputs: AttentionInputs, *, statistics: bool) -> list[str]:
        return []

    def attend(self, inputs: AttentionInputs) -> Float[Tensor, "b h q e"]:
        return run(inputs, statistics=False).out

    def observe(self, inputs: AttentionInputs) -> Rows:
        return run(inputs, statistics=True)

    def work(self, inputs: AttentionInputs, *, statistics: bool) -> Work:
        fused = fusing(inputs) is not None
        size = fused_size(inputs) if fused else tile_size(inputs)
        pairs = fused_pairs(inputs, size) if fused else None
        if pairs is None:
            pairs = visited_pairs(inputs, size.rows, KEY_TILE)
        if fused:
            numbers = scratch_numbers(inputs, size)
        else:
            tile = size.heads * inputs.group * size.rows * min(size.keys, inputs.shape.K)
            numbers = 2 * tile * inputs.comparison.scratch
        return Work(
            pairs,
            numbers * inputs.compute_dtype.itemsize,
            described(inputs, fused=fused),
        )
