"""Attention in plain PyTorch, tile by tile: any device, every feature, O(n) memory."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from regard.backends import inference_operators
from regard.backends.contract import Repeated, Rows, SecondPass, Work, run_again
from regard.backends.tiled.fused import fusing, outruns_pytorch
from regard.backends.tiled.loop import described
from regard.backends.tiled.operators import empty_out, run
from regard.backends.tiled.plan import Plan
from regard.backends.tiled.prepared_call import prepared, prepared_to_bind
from regard.backends.tiled.prepared_training import prepared_to_learn
from regard.backends.tiled.second_pass import TiledPass
from regard.backends.tiled.tiles import KEY_TILE, takes_all, tile_size
from regard.backends.tiled.units import scratch_of
from regard.cost.call_counts import dense_pairs, visited_pairs
from regard.inputs import AttentionInputs
from regard.transforms import RECORDED, recorded

__all__ = ["Tiled", "TiledPass", "outruns_pytorch"]


class Tiled:
    name = "tiled"
    observes = True

    def refuses(self, inputs: AttentionInputs, *, statistics: bool) -> list[str]:
        return [RECORDED] if recorded() else []

    def reserved(self, inputs: AttentionInputs) -> str:
        return ""

    def attend(self, inputs: AttentionInputs) -> Float[Tensor, "b h q e"]:
        return _run(inputs, statistics=False).out

    def observe(self, inputs: AttentionInputs) -> Rows:
        return _run(inputs, statistics=True)

    def repeated(self, inputs: AttentionInputs, *, statistics: bool) -> Repeated:
        plainly = run_again(self, inputs, statistics=statistics)
        if inputs.needs_grad:
            return prepared_to_learn(inputs, statistics=statistics) or plainly
        return prepared(inputs, plainly, statistics=statistics) or plainly

    def bound_anew(
        self, inputs: AttentionInputs, *, statistics: bool
    ) -> Callable[[AttentionInputs], Rows | Tensor] | None:
        plainly = self.observe if statistics else self.attend
        return prepared_to_bind(inputs, plainly, statistics=statistics)

    def questions(self) -> SecondPass:
        return TiledPass()

    def work(self, inputs: AttentionInputs, *, statistics: bool) -> Work:
        loop = fusing(inputs)
        if loop is not None:
            plan = Plan.of(inputs, loop)
            pairs = plan.pairs
            if pairs is None:
                pairs = _pairs(inputs, plan.rows)
            numbers, which = plan.held, described(inputs, fused=True) + plan.multiplied
        else:
            size = tile_size(inputs)
            pairs = _pairs(inputs, size.rows)
            tile = size.heads * inputs.group * size.rows * min(size.keys, inputs.shape.K)
            numbers = 2 * tile * scratch_of(inputs)
            which = described(inputs, fused=False)
        return Work(pairs, numbers * inputs.compute_dtype.itemsize, which)


def _pairs(x: AttentionInputs, rows: int) -> int:
    """Pairs that are computed."""
    return dense_pairs(x) if takes_all(x, rows) else visited_pairs(x, rows, KEY_TILE)


def _run(x: AttentionInputs, *, statistics: bool) -> Rows:
    return (
        _inference(x, statistics) if inference_operators.fits(x) else run(x, statistics=statistics)
    )


_inference = inference_operators.register("tiled", run, Tiled().repeated, empty_out)
