"""Which method shares a call among ranks: the one that is asked for, or the first that can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from regard.display import table_html
from regard.errors import RegardError
from regard.masks.tiles import count
from regard.parallel import ulysses
from regard.parallel.all_gather import AllGather
from regard.parallel.call import Call, Method
from regard.parallel.placed import placed_mask
from regard.parallel.ulysses import Ulysses

METHODS: dict[str, Callable[[Call], Method]] = {"ulysses": Ulysses, "all_gather": AllGather}
"""In order of preference."""
NOT_THERE = {"ring": "keys that travel from rank to rank are not implemented"}


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


def method_of(call: Call, name: str | None) -> Method:
    """The method asked for, or the first that can."""
    if name is None:
        return Ulysses(call) if not _refusals(call)["ulysses"] else AllGather(call)
    if name in NOT_THERE or name not in METHODS:
        raise RegardError(
            f"method {name!r}: {NOT_THERE[name]}" if name in NOT_THERE else "unknown method",
            got=repr(name),
            accepted=", ".join(map(repr, METHODS)) + " or None",
        )
    reasons = _refusals(call)[name]
    if reasons:
        raise RegardError(
            f"method {name!r} cannot share this call: {'; '.join(reasons)}",
            accepted="method='all_gather', which takes any heads",
            do="name it, or leave method= out",
        )
    return METHODS[name](call)


def plan_of(call: Call, name: str | None) -> ParallelPlan:
    """What would be done, without doing it."""
    method = method_of(call, name)
    x, W = call.inputs, call.ranks.size
    size = x.q.element_size()
    B, H, Q, K = call.shape
    D, G, E = x.q.shape[3], x.k.shape[1], x.v.shape[3]
    n, m = call.layout.longest, call.key_layout.longest
    if method.name == "ulysses":
        dealt = G if not G % W else W
        sent = B * (H * n * (D + E) + dealt * m * (D + E)) * (W - 1) // W
        held = B * (H // W * Q * D + dealt // W * K * (D + E))
        why = "each rank has all tokens of some heads, whatever the layout"
        busiest = 1.0
    else:
        sent = B * G * m * (D + E) * (W - 1)
        held = B * G * K * (D + E)
        why = "each rank has its queries and all keys"
        busiest = _busiest(call)
    if name is not None:
        why = f"asked for; {why}"
    refusals = _refusals(call) | {other: [why_not] for other, why_not in NOT_THERE.items()}
    dtype = str(x.q.dtype).removeprefix("torch.")
    return ParallelPlan(
        call=f"q {[B, H, Q, D]}, k {[B, G, K, D]}, v {[B, G, K, E]}, {dtype} on {x.q.device}, as "
        f"{call.layout!r}",
        method=method.name,
        why=why,
        refusals={other: reasons for other, reasons in refusals.items() if other != method.name},
        sent=sent * size,
        held=held * size,
        busiest=busiest,
    )


def _refusals(call: Call) -> dict[str, list[str]]:
    H, G = call.inputs.shape.H, call.inputs.k.shape[1]
    return {"ulysses": ulysses.refuses(H, G, call.ranks.size), "all_gather": []}


def _busiest(call: Call) -> float:
    """How many pairs the rank with most of them has, over the mean."""
    _, _, Q, K = call.shape
    device, mask = call.inputs.q.device, call.inputs.mask
    pairs = []
    for rank, n in enumerate(call.layout.lengths):
        if mask is None or not n:
            pairs.append(n * K)
            continue
        places = call.layout.positions(rank, device)
        own = placed_mask(mask, places, Q, None)
        assert own is not None
        pairs.append(count(own, call.shape._replace(B=own.batch, H=own.heads, Q=n), device))
    return max(pairs) * len(pairs) / max(sum(pairs), 1)
