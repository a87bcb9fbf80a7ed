"""One word for each head of a map: what it does on this text."""

from __future__ import annotations

from regard.interpret import badges
from regard.seen import Layer
from regard.traces import Trace
from regard.view.atlas.cores import one_core
from regard.view.atlas.maps import Map

LONGEST = 20_000
"""Tokens up to which heads are told: every pair of every head is read for it."""
ACROSS = ("first", "separator", "broad")
"""Words that mean something where one text looks at another: these have no place before."""


@one_core()
def head_badges(of: Map) -> list[str] | None:
    """A word for each head, or an empty one where nothing is plain; None where the text is too long
    to read every pair of it. Long work asks between two steps whether it is wanted: see
    `regard.cancellation`.

    >>> import regard, torch
    >>> from regard.view.atlas import Atlas
    >>> x = torch.eye(12)[None, None]
    >>> t = regard.trace(60 * x.roll(-1, -1), x, x, mask=regard.masks.causal())
    >>> head_badges(Atlas.of(t, tokens=list("abcdefghijkl"))[0])
    ['previous']
    """
    heads, queries, keys = of.shape
    if max(queries, keys) > LONGEST:
        return None
    traces = [_of_batch(of.traces[call], of.batch) for call in of.calls]
    layer = Layer(of.name, len(traces), None, traces, [0] * len(traces), [0] * len(traces))
    two = of.queries is not None and of.keys is not None and of.queries != of.keys
    found = badges({of.name: layer}, None if two else of.keys)
    words = list(found.get(of.name, ("",) * heads))
    return [word if word in ACROSS else "" for word in words] if two else words


def _of_batch(trace: Trace, batch: int) -> Trace:
    return (trace[batch] if trace.inputs.shape.B > 1 else trace).detach()
