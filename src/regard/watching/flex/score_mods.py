"""FlexAttention's score_mods as scale, soft-cap, bias and mask.

That a score_mod changes scores in a known way is proved from the operations it performs: along the
path of the score only a factor, a tanh, sums with what does not depend on the score, and minus
infinity where a pair is hidden. Then f(score) is a function of the score alone, 0 at 0, plus f(0):
so what is added and what is hidden is read from f(0), for every pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from regard import biases
from regard.biases.bias import Bias
from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.pair_programs import Function, graph_of, places
from regard.values import Shape
from regard.watching.flex.mask_mods import LARGEST, mask_of
from regard.watching.flex.pair_functions import PairFunction, every
from regard.watching.whole_masks import EVERYTHING

_aten = torch.ops.aten


@dataclass(frozen=True)
class Changed:
    """What becomes of a score: cap · tanh(gain · score / cap) + bias, where the mask allows it."""

    gain: float = 1.0
    softcap: float | None = None
    bias: Bias | None = None
    mask: Mask | None = None
    learned: bool = False
    """Whether it holds what learns, of which the bias is but the numbers."""


def change_of(
    score_mod: Function, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32
) -> Changed:
    """What a score_mod does to scores of a type, proved; refused where it cannot be."""
    zero = torch.zeros((), dtype=dtype, device=device)
    graph = graph_of(score_mod, zero, *places(device))
    path = _path(graph, dtype)

    def at_zero(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.as_tensor(score_mod(zero, b, h, q, k)).to(dtype)

    mask = bias = None
    if path.hidden:
        mask = mask_of(lambda b, h, q, k: at_zero(b, h, q, k) > -math.inf, shape, device)
    if path.added:

        def added(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            found = at_zero(b, h, q, k)
            return torch.where(found > -math.inf, found, 0.0) if path.hidden else found

        bias = _bias(PairFunction(added, shape, device))
    gain, cap = path.gain, None
    if path.outer is not None:
        cap = abs(path.outer)
        gain *= path.outer
    return Changed(gain, cap, bias, None if mask == EVERYTHING else mask, _learns(graph))


def _learns(graph: fx.Graph) -> bool:
    held = (getattr(graph.owning_module, n.target) for n in graph.nodes if n.op == "get_attr")
    return any(isinstance(t, Tensor) and t.requires_grad for t in held)


@dataclass(frozen=True)
class _Path:
    """What has become of the score: gain · score, or outer · tanh(gain · score)."""

    gain: float = 1.0
    outer: float | None = None
    added: bool = False
    """Whether something was added to it since."""
    hidden: bool = False
    """Whether some pairs are minus infinity instead."""

    def times(self, factor: float) -> _Path:
        if self.outer is None:
            return replace(self, gain=self.gain * factor)
        return replace(self, outer=self.outer * factor)


def _path(graph: fx.Graph, dtype: torch.dtype) -> _Path:
    """The way of the score through a graph."""
    paths: dict[fx.Node, _Path] = {}
    constants: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if not paths:
                paths[node] = _Path()
        elif node.op == "get_attr":
            constants[node] = getattr(graph.owning_module, node.target)
        elif node.op == "call_function":
            if any(n in paths for n in node.all_input_nodes):
                paths[node] = _step(node, paths, constants, dtype)
            elif all(n in constants for n in node.all_input_nodes):
                constants[node] = _computed(node, constants)
        else:
            (answer,) = node.all_input_nodes or (None,)
            if answer in paths:
                return paths[answer]
    raise _refused("its answer does not depend on the score")


def _step(
    node: fx.Node,
    paths: dict[fx.Node, _Path],
    constants: dict[fx.Node, Any],
    dtype: torch.dtype,
) -> _Path:
    """One operation on a score."""
    operation = node.target.overloadpacket  # type: ignore[union-attr]
    touched = [i for i, n in enumerate(node.args) if n in paths]
    if len(touched) != 1:
        raise _refused(f"{_name(node)} takes the score more than once")
    (here,) = touched
    path = paths[node.args[here]]  # type: ignore[index]

    def constant(place: int) -> float:
        found = node.args[place]
        if isinstance(found, fx.Node):
            found = constants.get(found)
        if isinstance(found, Tensor) and found.numel() == 1:
            return float(found)
        if isinstance(found, (int, float)):
            return found
        raise _refused(f"{_name(node)} of the score and something that is not a constant")

    match operation:
        case _aten.add | _aten.sub | _aten.rsub if len(node.args) == 2 and not node.kwargs:
            turned = here == (operation is _aten.sub) and operation is not _aten.add
            return replace(path.times(-1.0) if turned else path, added=True)
        case _aten.mul:
            return path.times(constant(1 - here))
        case _aten.div if here == 0 and not node.kwargs:
            return path.times(1 / constant(1))
        case _aten.neg:
            return path.times(-1.0)
        case _aten.tanh if path.outer is None and not (path.added or path.hidden):
            return replace(path, outer=1.0)
        case _aten.where if here > 0 and constant(3 - here) == -math.inf:
            return replace(path, hidden=True)
        case _aten.masked_fill if here == 0 and constant(2) == -math.inf:
            return replace(path, hidden=True)
        case _aten.clone | _aten.detach | _aten.alias:
            return path
        case _aten._to_copy if node.kwargs.get("dtype") in (dtype, torch.float64):
            return path
    raise _refused(f"{_name(node)} of the score cannot be said as scale, soft-cap, bias or mask")


def _computed(node: fx.Node, constants: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), constants.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _name(node: fx.Node) -> str:
    return str(node.target.overloadpacket).removeprefix("aten.")  # type: ignore[union-attr]


def _refused(why: str) -> RegardError:
    return RegardError(
        "a score_mod changes scores in a way that a trace cannot hold",
        got=why,
        accepted="score * number, number * tanh(score / number), score + anything that does not "
        "depend on it, and -inf where a pair is hidden",
        do="leave the layer out with layers=, or write its attention with regard.attention",
    )


def _bias(added: PairFunction) -> Bias:
    """What is added to scores: by distance where that is all that matters, else written out."""
    found = _relative(added)
    if found is not None:
        return found
    if added.pairs * 4 > LARGEST:
        raise RegardError(
            "a score_mod adds something for each pair that is too large to be written out",
            got=f"{list(added.shape)} [B, H, Q, K]: {added.pairs * 4 / 2**20:.0f} MiB",
            accepted=f"what depends on head and distance only; any other up to "
            f"{LARGEST / 2**20:.0f} MiB",
            do="leave the layer out with layers=",
        )
    return biases.dense(added.whole())


def _relative(added: PairFunction) -> Bias | None:
    if added.batch > 1:
        return None
    Q, K = added.shape[2:]
    reach, device = max(Q, K, 2) - 1, added.device
    heads, none = torch.arange(added.heads, device=device), torch.zeros(1, device=device).long()
    ahead, behind = torch.arange(K, device=device), torch.arange(1, Q, device=device)
    values = [
        every(added.function, (none, heads, behind, none))[0, :, :, 0].flip(-1),
        every(added.function, (none, heads, none, ahead))[0, :, 0, :],
    ]
    table = values[0].new_zeros(added.heads, 2 * reach + 1)
    table[:, reach - len(behind) : reach + K] = torch.cat(values, 1)
    for candidate in _by_distance(table, added.shape, reach):
        bound = candidate.bind(added.shape, device)
        k = torch.arange(K, device=device)
        if all(torch.equal(bound.at(q, k), v) for q, v in added.pieces()):
            return candidate
    return None


def _by_distance(table: Tensor, shape: Shape, reach: int) -> Iterator[Bias]:
    offset = None if shape.Q == shape.K else 0
    if len(table) == shape.H:
        yield biases.alibi(-table[:, reach - 1], offset=offset)
    yield biases.relative(table, offset=offset)
