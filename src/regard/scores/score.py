"""What a score is: a way to compare queries with keys."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.arguments import described, is_number
from regard.errors import RegardError
from regard.scores.comparison import Comparison
from regard.values import Value

Prepared = tuple[Tensor, Tensor, Comparison]


class Score(Value):
    """A way to compare queries with keys."""

    def prepare(
        self, q: Float[Tensor, "b h q d"], k: Float[Tensor, "b g k e"], scale: float | None
    ) -> Prepared:
        """Queries and keys as the comparison wants them, and the comparison."""
        raise NotImplementedError

    def _refuse_scale(self, scale: float | None) -> None:
        if scale is not None:
            raise RegardError(
                f"scale= multiplies dot products; {self!r} has its own sharpness",
                got=f"scale={scale}",
                accepted="scale= with dot(), scaled_dot() or general(W)",
                do="set the score's own parameter",
            )


def same_width(name: str, q: Tensor, k: Tensor) -> None:
    """Refuse queries and keys of different widths."""
    if q.shape[-1] != k.shape[-1]:
        raise RegardError(
            f"{name} compares queries and keys of one width",
            got=f"q {q.shape[-1]} wide, k {k.shape[-1]} wide",
            accepted="the same last axis",
            do="use scores.general(W) or scores.additive(Wq, Wk, w) for different widths",
        )


def apart(x: Float[Tensor, "... d"]) -> tuple[Bool[Tensor, "... 1"], Float[Tensor, "... d"]]:
    """Which vectors are not finite, and all of them with 0 in place of those: in what is learned,
    0 · NaN would let masked ones through."""
    broken = ~x.isfinite().all(-1, keepdim=True)
    return broken, x.masked_fill(broken, 0.0)


def finite_scale(scale: float) -> float:
    """Refuse a scale that is not a finite number."""
    if not is_number(scale):
        raise RegardError("scale is a number", got=described(scale), accepted="a finite number")
    scale = torch.sym_float(scale)
    if not -math.inf < scale < math.inf:
        raise RegardError("scale must be finite", got=str(scale), accepted="a finite number")
    return scale


def positive(name: str, value: float) -> float:
    """Refuse what cannot divide."""
    if not (is_number(value) and 0 < value < math.inf):
        raise RegardError(
            f"{name} must be positive", got=described(value), accepted="a number above 0"
        )
    return value


def per_head(matrix: Tensor, ndim: int, heads: int, name: str) -> None:
    """Refuse a parameter that is neither shared nor one per head."""
    if matrix.ndim == ndim or (matrix.ndim == ndim + 1 and matrix.shape[0] == heads):
        return
    raise RegardError(
        f"{name} is one parameter for all heads or one per head",
        got=f"{list(matrix.shape)} for {heads} heads",
        accepted=f"{ndim} axes, or {ndim + 1} with {heads} first",
    )
