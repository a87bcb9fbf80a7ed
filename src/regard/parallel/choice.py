"""Which method shares a call among ranks: the one that is asked for, or the first that can."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from regard.display import table_html
from regard.errors import RegardError
from regard.parallel.balance import busiest, busiest_round
from regard.parallel.call import Call, Method
from regard.parallel.methods import ulysses
from regard.parallel.methods.all_gather import AllGather
from regard.parallel.methods.ring import Ring
from regard.parallel.methods.ulysses import Ulysses

METHODS: dict[str, Callable[[Call], Method[Any]]] = {
    "ulysses": Ulysses,
    "all_gather": AllGather,
    "ring": Ring,
}
"""In order of preference."""
FIT = 8
"""Gathered keys and values fit if they take at most one such part of a device's memory: their
gradients take as much again, and other layers want the rest."""


@dataclass(frozen=True)
class ParallelPlan:
    """How ranks share a call. Prints as a table, and is one in a notebook."""

    call: str
    method: str
    why: str
    refusals: dict[str, list[str]]
    """For every other method, why not; an empty list: it could, but was not chosen."""
    sent: int
    """Bytes that each rank sends in a forward pass."""
    held: int
    """Bytes of queries, keys and values that each rank holds beside its own."""
    busiest: float
    """The pairs of the rank that has most, over their mean."""

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("method", f"{self.method}: {self.why}")]
        for name, reasons in self.refusals.items():
            rows.append((f"not {name}", "; ".join(reasons) or "it could, but ranks lower"))
        rows.append(("sent", f"{self.sent:,} bytes by each rank, forward"))
        rows.append(("held", f"{self.held:,} bytes of q, k and v beside its own, at most"))
        rows.append(("busiest rank", f"{self.busiest:.2f} of the mean of all ranks"))
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join([self.call, *(f"  {label:<{width}}  {text}" for label, text in rows)])

    def _repr_html_(self) -> str:
        return table_html(self._rows(), title=self.call)


class Traffic(NamedTuple):
    """Numbers, not bytes, that a method sends and holds on each rank."""

    sent: int
    held: int


def method_of(call: Call, name: str | None) -> Method[Any]:
    """The method asked for, or the first that can and fits."""
    if name is None:
        able = (other for other, reasons in _reasons(call).items() if not reasons)
        return METHODS[next(able)](call)
    if name not in METHODS:
        raise RegardError(
            "unknown method",
            got=repr(name),
            accepted=", ".join(map(repr, METHODS)) + " or None",
        )
    reasons = _refusals(call)[name]
    if reasons:
        raise RegardError(
            f"method {name!r} cannot share this call: {'; '.join(reasons)}",
            accepted="method='all_gather' or method='ring', which take any heads",
            do="name one, or leave method= out",
        )
    return METHODS[name](call)


def plan_of(call: Call, name: str | None) -> ParallelPlan:
    """What would be done, without doing it."""
    method = method_of(call, name)
    x = call.inputs
    size = x.q.element_size()
    B, H, Q, K = call.shape
    D, G, E = x.q.shape[3], x.k.shape[1], x.v.shape[3]
    why = {
        "ulysses": "each rank has all tokens of some heads, whatever the layout",
        "all_gather": "each rank has its queries and all keys",
        "ring": "each rank has its queries, and the keys of one rank at a time",
    }[method.name]
    uneven = {"all_gather": busiest, "ring": busiest_round}.get(method.name, lambda _: 1.0)(call)
    traffic = traffic_of(call, method.name)
    # A method that is named is refused only for what it cannot do.
    reasons = _reasons(call) if name is None else _refusals(call)
    dtype = str(x.q.dtype).removeprefix("torch.")
    return ParallelPlan(
        call=f"q {[B, H, Q, D]}, k {[B, G, K, D]}, v {[B, G, K, E]}, {dtype} on {x.q.device}, as "
        f"{call.layout!r}",
        method=method.name,
        why=why if name is None else f"asked for; {why}",
        refusals={other: why_not for other, why_not in reasons.items() if other != method.name},
        sent=traffic.sent * size,
        held=traffic.held * size,
        busiest=uneven,
    )


def traffic_of(call: Call, method: str) -> Traffic:
    """What a forward pass sends and holds beside a rank's own tokens."""
    x, W = call.inputs, call.ranks.size
    B, H, Q, K = call.shape
    D, G, E = x.q.shape[3], x.k.shape[1], x.v.shape[3]
    n, m = call.layout.longest, call.key_layout.longest
    if method == "ulysses":
        dealt = G if not G % W else W
        sent = B * (H * n * (D + E) + dealt * m * (D + E)) * (W - 1) // W
        return Traffic(sent, B * (H // W * Q * D + dealt // W * K * (D + E)))
    block = B * G * m * (D + E)
    if method == "ring":
        # The block that is looked at, and the one that arrives.
        return Traffic(block * (W - 1), block * min(W - 1, 2))
    return Traffic(block * (W - 1), B * G * K * (D + E))


def room(device: torch.device) -> float:
    """Bytes of a device's memory; infinite where it is unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return float("inf")


def _refusals(call: Call) -> dict[str, list[str]]:
    """Why a method cannot share a call."""
    H, G = call.inputs.shape.H, call.inputs.k.shape[1]
    return {"ulysses": ulysses.refuses(H, G, call.ranks.size), "all_gather": [], "ring": []}


def _reasons(call: Call) -> dict[str, list[str]]:
    """Why a method is not chosen unless it is asked for."""
    bytes_ = traffic_of(call, "all_gather").held * call.inputs.q.element_size()
    whole = room(call.inputs.q.device)
    wide = [
        f"all keys and values, {bytes_:,} bytes, are more than 1/{FIT} of the device's {whole:,}"
    ]
    return _refusals(call) | {"all_gather": wide if bytes_ * FIT > whole else []}
