"""An atlas: the maps of what was seen, one per layer and text.

A text is the run that begins it and the steps of generating that follow. Of a layer whose traces
were not kept there is a summary instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regard.arguments import described
from regard.errors import RegardError
from regard.jagged import JaggedTrace
from regard.seen import Layer, Seen, Tokens, joined, let_go
from regard.traces import Trace
from regard.view.atlas.bare_weights import Weights, looked_at
from regard.view.atlas.maps import Map, check_place
from regard.view.atlas.patches import Patches
from regard.view.atlas.quantities import QUANTITIES
from regard.view.atlas.summaries import Summary, known_of, refuse_places


class Atlas:
    """The maps of what was seen. `Atlas.of` takes a trace, or what a watch saw.

    >>> import regard, torch
    >>> x = torch.randn(1, 2, 5, 4)
    >>> atlas = Atlas.of(regard.trace(x, x, x), tokens=["a", "b", "c", "d", "e"])
    >>> [(m.name, m.shape) for m in atlas.maps]
    [('trace', (2, 5, 5))]
    """

    def __init__(
        self, maps: Sequence[Map], model: str = "", summaries: Sequence[Summary] = ()
    ) -> None:
        self.maps = list(maps)
        self.summaries = list(summaries)
        self.model = model

    @staticmethod
    def of(
        what: Trace | Seen | Weights | Atlas,
        tokens: Tokens | None = None,
        *,
        queries: Sequence[str] | None = None,
        batch: int = 0,
    ) -> Atlas:
        """The atlas of a trace, or of all layers that were seen.

        `tokens` name the keys, and the queries where there are as many; `queries=` names those of
        another text. What was seen with a tokenizer knows its own."""
        if isinstance(what, Atlas):
            return what
        found = looked_at(what)
        if isinstance(found, JaggedTrace):
            found, batch = found[batch], 0
        if isinstance(found, Trace):
            layer = Layer("trace", 1, None, [found], [0], [0])
            model, layers, known = "", [layer], None
        elif isinstance(found, Seen):
            model, layers, known = found.model, list(found.values()), found.tokens
        else:
            raise RegardError(
                "this cannot be looked at",
                got=type(what).__name__,
                accepted="a Trace, what regard.watch or regard.load gave, or tensors of weights",
            )
        words = _of_batch(known if tokens is None else tokens, batch)
        if not layers:
            raise RegardError("no attention was seen", do="run the model while it is watched")
        traced = [layer for layer in layers if len(layer.traces)]
        summaries = [
            Summary(layer) for layer in layers if not len(layer.traces) and known_of(layer)
        ]
        if not traced and not summaries:
            raise RegardError(
                "there is nothing to look at",
                got=f"{len(layers)} layers with neither traces nor statistics",
                do="run the model while it is watched, and keep one of the two",
            )
        if not traced:
            asked = {"tokens=": tokens is not None, "queries=": queries is not None}
            wrong = [name for name, given in (asked | {"batch=": batch != 0}).items() if given]
            if wrong:
                raise refuse_places(", ".join(wrong))
            return Atlas([], model, summaries)
        maps = [m for layer in traced for m in _maps(layer, batch, words, queries)]
        given = [text for text in (words if tokens is not None else None, queries) if text]
        for text in given:
            if not any(text in (m.keys, m.queries) for m in maps):
                _, Q, K = maps[0].shape
                raise RegardError(
                    "tokens are one text for each place",
                    got=f"{len(text)} tokens",
                    accepted=f"{K} for the keys, {Q} for the queries",
                )
        return Atlas(maps, model, summaries)

    def __getitem__(self, place: int) -> Map:
        check_place(place, len(self.maps), "map")
        return self.maps[place]

    def know(self, badges: Mapping[str, Sequence[str]]) -> Atlas:
        """The same atlas, which knows by the path of a layer what its heads do over many texts."""
        for m in self.maps:
            words = badges.get(m.name, ())
            m.known = words if len(words) == m.shape[0] else ()
        return self

    def index(self) -> dict[str, Any]:
        """Everything about the maps that is no weight, as JSON: O(n)."""
        texts: list[Sequence[str]] = []

        def known(text: Sequence[str] | None) -> int:
            if text is None:
                return -1
            for place, other in enumerate(texts):
                if other is text or other == text:
                    return place
            texts.append(text)
            return len(texts) - 1

        maps = [
            m.describe() | {"queryText": known(m.queries), "keyText": known(m.keys)}
            for m in self.maps
        ]
        layers = [{"name": q.name, "title": q.title, "about": q.about} for q in QUANTITIES.values()]
        return {
            "version": 1,
            "model": self.model,
            "maps": maps,
            "summaries": [summary.describe() for summary in self.summaries],
            "texts": [list(t) for t in texts],
            "pictures": [t.describe() if isinstance(t, Patches) else None for t in texts],
            "quantities": layers,
        }


def _maps(
    layer: Layer, batch: int, words: Sequence[str] | None, queries: Sequence[str] | None
) -> list[Map]:
    """One map per text that the layer read."""
    parts = [part for calls in _texts(layer) for part in _joined(layer, calls)]
    maps = []
    for text, m in enumerate(parts):
        path = layer.path or "(model)"
        m.name = path if len(parts) == 1 else f"{path} · {text + 1}"
        B = m.traces[m.calls[0]].inputs.shape.B
        check_place(batch, B, "batch")
        m.batch = batch
        _, Q, K = m.shape
        m.keys = words if words is not None and len(words) == K else None
        own = queries if queries is not None else words
        m.queries = own if own is not None and len(own) == Q else None
        maps.append(m)
    return maps


def _texts(layer: Layer) -> list[range]:
    """The calls of each text: a run that begins it, and the steps that go on with it."""
    n = len(layer.traces)
    begins = [i for i in range(n) if i == 0 or i >= len(layer.steps) or layer.steps[i] == 0]
    return [range(*ends) for ends in zip(begins, [*begins[1:], n], strict=True)]


def _joined(layer: Layer, calls: range) -> list[Map]:
    """The calls of a text as one map; or one of each call, where keys cannot be put in place."""
    together = Map("", layer.traces, calls)
    if len(calls) == 1:
        return [together]
    traces = [layer.traces[call] for call in calls]
    whole = joined(traces)
    if whole is not None:
        return [Map("", [whole], range(1), steps=together.starts[:-1])]
    if let_go(traces):
        return [Map("", layer.traces, range(call, call + 1)) for call in calls]
    return [together]


def _of_batch(tokens: Tokens | None, batch: int) -> Sequence[str] | None:
    if tokens is None:
        return None
    if not isinstance(tokens, Sequence) or not all(map(_are_texts, tokens)):
        raise RegardError(
            "tokens= are texts",
            got=described(tokens),
            accepted='a list of texts, ["The", " cat"], or one such list per sequence',
        )
    if not len(tokens):
        return None
    if isinstance(tokens[0], str):
        return tokens  # type: ignore[return-value]
    check_place(batch, len(tokens), "batch")
    return tokens[batch]


def _are_texts(row: object) -> bool:
    """A text, or a list of them."""
    if isinstance(row, str):
        return True
    return isinstance(row, Sequence) and all(isinstance(word, str) for word in row)
