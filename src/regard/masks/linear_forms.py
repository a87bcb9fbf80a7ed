"""Whether a function of query and key is one of their distance: a proof from its operations.

Along the graph each value is a·q + c·k + a constant, all of them whole numbers (a linear form), or
depends on q and k at most through q - k, or in an unknown way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from regard.pair_programs import Program

_aten = torch.ops.aten
_COMPARED = {_aten.ge, _aten.gt, _aten.le, _aten.lt, _aten.eq, _aten.ne}
_SUMS = {_aten.add: 1, _aten.sub: -1}

Form = tuple[int, int]
DISTANCE = "distance"
UNKNOWN = "unknown"
Kind = Form | str
CONSTANT: Form = (0, 0)


def is_of_distance(program: Program) -> bool:
    """Whether a program depends on q and k only through their distance, and on nothing else."""
    b, h, q, k = program.used
    if b or h or not (q and k):
        return False
    places = [n for n in program.code.graph.nodes if n.op == "placeholder"][-2:]
    kinds: dict[fx.Node, Kind] = {places[0]: (1, 0), places[1]: (0, 1)}
    for node in program.code.graph.nodes:
        if node.op == "output":
            return _distance(kinds[node.args[0]])
        if node not in kinds:
            kinds[node] = _kind(node, kinds)
    return False


def _distance(kind: Kind) -> bool:
    return kind == DISTANCE or (isinstance(kind, tuple) and sum(kind) == 0)


def _kind(node: fx.Node, kinds: dict[fx.Node, Kind]) -> Kind:
    if node.op == "placeholder":
        return CONSTANT if node.meta.get("whole") else DISTANCE
    operation: Any = getattr(node.target, "overloadpacket", None)
    given = [kinds[n] if isinstance(n, fx.Node) else CONSTANT for n in node.args[:2]]
    forms = [kind for kind in given if isinstance(kind, tuple)]
    # Sums with fractions may be rounded, differently at different places.
    exact = len(forms) == len(node.args) == 2 and not node.kwargs
    exact = exact and all(type(n) in (int, fx.Node) for n in node.args)
    if exact and operation in _SUMS:
        (a, c), (a2, c2) = forms
        sign = _SUMS[operation]
        return a + sign * a2, c + sign * c2
    if exact and operation in _COMPARED:
        (a, c), (a2, c2) = forms
        return DISTANCE if a - a2 + c - c2 == 0 else UNKNOWN
    if operation is _aten.neg and len(forms) == 1:
        return -forms[0][0], -forms[0][1]
    if operation is _aten.mul and exact:
        number = next((n for n in node.args if isinstance(n, int)), None)
        form = next((f for f in forms if f != CONSTANT), CONSTANT)
        if number is not None:
            return form[0] * number, form[1] * number
    inputs = [kinds[n] for n in node.all_input_nodes]
    if all(kind == CONSTANT for kind in inputs):
        return CONSTANT
    return DISTANCE if all(map(_distance, inputs)) else UNKNOWN
