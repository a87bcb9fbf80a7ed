"""What is to be drawn: one head of a trace, or the mean of its heads, with names for its places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

from regard.arguments import described
from regard.errors import RegardError
from regard.jagged import JaggedTrace
from regard.seen import Layer, Seen
from regard.traces import Trace
from regard.values import whole
from regard.view.atlas.bare_weights import Weights, looked_at
from regard.view.atlas.labels import clean
from regard.view.atlas.summaries import KEEP

Head = int | Literal["mean"]
"""Which head, from 0, or the mean of all of them."""


@dataclass(frozen=True, eq=False)
class Choice:
    """One batch entry of a trace, with one head or all of them, and what its places are called."""

    trace: Trace
    keys: tuple[str, ...]
    queries: tuple[str, ...]
    shift: int
    """How far the first query stands from the first key."""
    name: str
    """Which head of which layer this is."""

    @property
    def heads(self) -> int:
        return self.trace.inputs.shape.H


def choose(
    given: Trace | Seen | Weights,
    tokens: Sequence[str] | None = None,
    *,
    layer: int | str = 0,
    head: Head = 0,
    batch: int = 0,
    call: int | None = None,
    queries: Sequence[str] | None = None,
) -> Choice:
    """One head, or the mean of the heads, out of a trace or out of all that was seen of a model.

    A layer is chosen by its number from 0, or by its path, in which * matches anything. `tokens`
    name the keys; without them they are what the model read, or numbers from 1.

    >>> import regard, torch
    >>> x = torch.randn(1, 4, 3, 8)
    >>> choose(regard.trace(x, x, x), ["to", "be", "or"], head="mean").name
    'mean of 4 heads'
    """
    name, what = "", looked_at(given)
    if isinstance(what, Seen):
        number, found = layer_of(what, layer)
        name = f"layer {number}, "
        spoken = (read(what, batch) if tokens is None else None) or []
        what = _call(found, call)
        # While a text is generated, early calls see only its beginning.
        if len(spoken) >= what.inputs.shape.K:
            tokens = spoken[: what.inputs.shape.K]
    if not isinstance(what, Trace):
        raise RegardError(
            "there is nothing to draw",
            got=described(what),
            accepted="a trace, what watch saw, or weights",
        )
    if isinstance(what, JaggedTrace):
        what, batch = what[batch], 0
    _, H, Q, K = what.inputs.shape
    if not Q or not K:
        raise RegardError("there is nothing to draw", got=repr(what), accepted="a query and a key")
    part = what[batch] if head == "mean" else what[batch, _head(head, H)]
    name += f"mean of {H} heads" if head == "mean" else f"head {head % H}"
    keys, names = _names(tokens, queries, Q, K)
    return Choice(part.detach(), keys, names or keys[K - Q :], 0 if names else K - Q, name)


def layer_of(seen: Mapping[str, Layer], layer: int | str) -> tuple[int, Layer]:
    """A layer by its number among those that were seen, or by its path."""
    paths = list(seen)
    if not isinstance(layer, str):
        whole("layer", layer)
    if isinstance(layer, str) and not layer.removeprefix("-").isdecimal():
        places = [i for i, path in enumerate(paths) if path == layer or fnmatch(path, layer)]
    else:
        places = [i for i in range(len(paths)) if int(layer) in (i, i - len(paths))]
    if len(places) != 1:
        raise RegardError(
            "no such layer was seen" if not places else "more than one layer has such a path",
            got=repr(layer),
            accepted=f"0 to {len(paths) - 1}, or one of {_some(paths)}" if paths else "",
            do="" if paths else "run the model while it is watched",
        )
    return places[0], seen[paths[places[0]]]


def read(seen: Seen, batch: int = 0) -> Sequence[str] | None:
    """What one sequence of a batch said, if it is known."""
    tokens: Any = seen.tokens
    if tokens is None or not len(tokens):
        return None
    if isinstance(tokens[0], str):
        return list(tokens)
    return list(tokens[batch]) if -len(tokens) <= batch < len(tokens) else None


def _call(layer: Layer, call: int | None) -> Trace:
    traces = layer.traces
    if call is None and len(traces) == 1:
        call = 0
    if call is not None and -len(traces) <= whole("call", call) < len(traces):
        return traces[call]
    if not len(traces):
        raise RegardError(
            f"{layer.path!r} has no traces, only statistics",
            do=f"keep traces: {KEEP}",
        )
    raise RegardError(
        f"{layer.path!r} was called {len(traces)} times",
        got=f"call={call}",
        accepted=f"a call from 0 to {len(traces) - 1}",
    )


def _head(head: int, heads: int) -> int:
    if isinstance(head, int) and -heads <= head < heads:
        return head
    raise RegardError(
        "there is no such head", got=repr(head), accepted=f"0 to {heads - 1}, or 'mean'"
    )


def _names(
    tokens: Sequence[str] | None, queries: Sequence[str] | None, Q: int, K: int
) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """What keys are called, and queries where they have names of their own."""
    for name, given in (("tokens", tokens), ("queries", queries)):
        if given is not None and not isinstance(given, Sequence):
            raise RegardError(
                f"{name}= are texts", got=described(given), accepted="a list of texts"
            )
    if queries is not None and len(queries) != Q:
        raise RegardError(
            "queries= names each query", got=f"{len(queries)} names", accepted=f"{Q} names"
        )
    if tokens is not None and len(tokens) != K:
        raise RegardError(
            "tokens name each key", got=f"{len(tokens)} tokens", accepted=f"{K} tokens"
        )
    if queries is None and Q > K:
        if tokens is not None:
            raise RegardError(
                "queries that are no keys need names of their own",
                got=f"{Q} queries, {K} keys",
                do="pass queries=",
            )
        queries = _numbers(Q)
    keys = tuple(map(clean, _numbers(K) if tokens is None else tokens))
    return keys, None if queries is None else tuple(map(clean, queries))


def _numbers(n: int) -> list[str]:
    return [str(place + 1) for place in range(n)]


def _some(paths: list[str]) -> str:
    return ", ".join(map(repr, paths if len(paths) <= 6 else [*paths[:5], "…", paths[-1]]))
