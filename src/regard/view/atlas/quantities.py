"""What a map can show of each pair: layers of the same map.

A layer is a number that is never negative, made from the weights of some pairs of one head. All
else follows from this table: the tiles and tooltips of app and widget, the choice in the front end,
the legend, and what an error says is accepted. So the gradient of an output with respect to a
weight, or what is lost when a pair is knocked out, is one more entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import RegardError
from regard.traces import Trace

Pairs = Float[Tensor, "q k"]
Queries = Int[Tensor, "q"]
Keys = Int[Tensor, "k"]


@dataclass(frozen=True)
class Quantity:
    """A layer of the map: what it is called, what a cell of it is, and how it is computed.

    `of` takes the trace of one head, the weights of some pairs, and their queries and keys.
    """

    name: str
    title: str
    about: str
    of: Callable[[Trace, Pairs, Queries, Keys], Pairs]


def _weight(t: Trace, weights: Pairs, queries: Queries, keys: Keys) -> Pairs:
    return weights


def _value(t: Trace, weights: Pairs, queries: Queries, keys: Keys) -> Pairs:
    """What a pair moves: the weight times the length of the value, over the mean length."""
    length: Tensor = t.inputs.v[0, 0].to(weights.dtype).norm(dim=-1)
    return weights * (length / length.mean().clamp_min(1e-30))[keys]


QUANTITIES = {
    quantity.name: quantity
    for quantity in (
        Quantity("weight", "Weight", "weight", _weight),
        Quantity("value", "Weight × value", "weight × length of the value", _value),
    )
}


def quantity_of(name: str) -> Quantity:
    """A layer of the map by its name.

    >>> quantity_of("value").title
    'Weight × value'
    """
    if name not in QUANTITIES:
        raise RegardError("unknown quantity", got=repr(name), accepted=" or ".join(QUANTITIES))
    return QUANTITIES[name]
