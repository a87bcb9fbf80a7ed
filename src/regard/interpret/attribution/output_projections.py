"""Where a layer projects what its heads read: the matrix by which each writes to the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import RegardError
from regard.interpret.attribution.linear_maps import inside, linear_map, parts_of

NAMES = (
    "out_proj", "o_proj", "c_proj", "dense", "out_lin", "to_out", "wo", "o", "proj", "resid_proj",
)  # fmt: skip
BESIDE = ("output.dense", "output")
"""Names in the module above, where attention itself ends before the projection."""

Output = Callable[[str, nn.Module], Any]
"""From the path of an attention module and the module: its output projection, as a module or a
matrix [H·E, D]; None to find it by name."""


class OutputProjection(NamedTuple):
    """What each head multiplies what it read with, and what is added once."""

    weight: Float[Tensor, "h e d"]
    bias: Float[Tensor, "d"] | None


def output_projection(
    model: nn.Module, path: str, heads: int, width: int, output: Output | None = None
) -> OutputProjection:
    """The output projection of an attention module, head by head."""
    module = model.get_submodule(path)
    found = None if output is None else output(path, module)
    found = _by_name(model, path, module) if found is None else found
    if found is None:
        raise RegardError(
            "the output projection of this layer is not known by name",
            got=f"{type(module).__name__} at {path!r} with {parts_of(module)}",
            accepted="a part named " + ", ".join(NAMES),
            do="say where it is: output=lambda path, module: module.my_projection",
        )
    weight, bias = linear_map(found, heads * width)
    if weight.shape[0] != heads * width:
        raise RegardError(
            "an output projection does not fit the heads that were seen",
            got=f"{list(weight.shape)} for {path!r}",
            accepted=f"[{heads * width}, D]: {heads} heads of width {width}",
            do="say where it is: output=lambda path, module: module.my_projection",
        )
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    return OutputProjection(weight.unflatten(0, (heads, width)), bias)


def _by_name(model: nn.Module, path: str, module: nn.Module) -> nn.Module | None:
    above = model.get_submodule(path.rpartition(".")[0]) if "." in path else model
    named = [*((module, name) for name in NAMES), *((above, name) for name in BESIDE)]
    for whole, name in named:
        found = inside(whole, name)
        if isinstance(found, (nn.Sequential, nn.ModuleList)) and len(found):
            found = found[0]
        if isinstance(found, nn.Module) and isinstance(getattr(found, "weight", None), Tensor):
            return found
    return None
