"""Linear maps inside modules of other libraries: matrices that rows are multiplied with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import RegardError


class LinearMap(NamedTuple):
    """x ↦ x @ weight + bias."""

    weight: Float[Tensor, "i o"]
    bias: Float[Tensor, "o"] | None


@torch.no_grad()
def linear_map(module: Any, wide: int | None = None) -> LinearMap:
    """The matrix of a module that is linear, also where adapters or a quantiser are around it: then
    it is what the module makes of the unit vectors. `wide` is how many there are."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    kind = type(module).__name__
    if isinstance(module, Tensor):
        return LinearMap(module, None)
    plain = isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()
    if plain and (type(module) in (nn.Linear, _MULTIHEAD_OUTPUT) or kind == "Conv1D"):
        assert isinstance(weight, Tensor)
        return LinearMap(weight if kind == "Conv1D" else weight.T, bias)
    like = next((p for p in module.parameters() if p.is_floating_point()), None)
    wide = getattr(module, "in_features", None) if wide is None else wide
    if like is None or wide is None:
        raise RegardError(
            "this module is not a linear map that can be read off",
            got=kind,
            accepted="nn.Linear, or a module with in_features",
        )
    zero = module(torch.zeros(1, wide, dtype=like.dtype, device=like.device))
    units = module(torch.eye(wide, dtype=like.dtype, device=like.device))
    return LinearMap(units - zero, zero[0] if bool(zero.any()) else None)


_MULTIHEAD_OUTPUT = nn.modules.linear.NonDynamicallyQuantizableLinear


def inside(module: nn.Module, path: str) -> Any:
    """What is found at a path inside a module, or None."""
    found: Any = module
    for name in path.split(".") if path else []:
        found = getattr(found, name, None)
    return found


def parts_of(module: nn.Module) -> str:
    """The names of what a module is made of."""
    return ", ".join(name for name, _ in module.named_children()) or "no parts"
