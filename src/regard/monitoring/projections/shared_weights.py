"""Weights that several layers have in common, or the queries and keys of one: to be scaled once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from regard.errors import RegardError
from regard.monitoring.projections.sharded_weights import stood_for


class Memory(NamedTuple):
    """Where the numbers of a view are."""

    of: int
    """Which sharded weight it is about; 0 for one whose numbers are here."""
    start: int
    stop: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of_view(view: Tensor) -> Memory:
        weight = stood_for(view)
        start = view.data_ptr() if weight is None else view.storage_offset()
        last = sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
        stop = start + (last + 1) * (view.element_size() if weight is None else 1)
        whose = 0 if weight is None else id(weight)
        return Memory(whose, int(start), int(stop), tuple(view.shape), view.stride())


def memory(views: Iterable[Tensor]) -> frozenset[Memory]:
    return frozenset(map(Memory.of_view, views))


def together(weights: Mapping[str, frozenset[Memory]]) -> list[list[str]]:
    """Layers by the weights that they have: those that share all of them are one group."""
    groups: dict[Any, list[str]] = {}
    for path, mine in weights.items():
        groups.setdefault(mine or path, []).append(path)
    return list(groups.values())


def shared_in_part(weights: Mapping[str, frozenset[Memory]]) -> dict[str, str]:
    """Of layers that have other weights, each that shares some with another, and with which."""
    found: dict[str, str] = {}
    spans = sorted(
        (at.of, at.start, at.stop, path) for path, each in weights.items() for at in each
    )
    # Of those that begin before, the one that reaches farthest.
    reach = (0, 0, "")
    for whose, start, stop, path in spans:
        of, until, other = reach
        meets = whose == of and start < until
        if meets and path != other:
            found |= {path: other, other: path}
        if not meets or stop > until:
            reach = (whose, stop, path)
    return found


def refuse_shared(path: str, other: str) -> NoReturn:
    """No factor would be right for both."""
    raise RegardError(
        "QK-clip cannot scale what two layers share in part",
        got=f"{path or '(model)'!r} with some of the weights of {other or '(model)'!r}",
        accepted="layers that share all weights of their queries and keys, or none",
        do="leave them out: QKClip(layers=...), where rules still report large logits",
    )
