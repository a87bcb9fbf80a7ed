"""A parse as arcs: which token depends on which, and how the heads of a model follow them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.arguments import described
from regard.errors import RegardError
from regard.interpret.head_scores.syntax.syntax_table import Follows, Syntax
from regard.interpret.head_scores.texts.text_batches import Batch, Texts


class Arc(NamedTuple):
    """A pair of places of a text; `kind` is the direction and the label."""

    text: int
    query: int
    key: int
    kind: tuple[str, str]


def arcs_of(parses: Sequence[Any], texts: Texts) -> list[Arc]:
    """The arcs of parses, both ways: for each text the place of the head of every token, or that
    and the labels. A token without a head has None, -1 or its own place."""
    if len(parses) != len(texts.calls):
        raise RegardError(
            "every text needs its parse", got=f"{len(parses)} for {len(texts.calls)} texts"
        )
    found = []
    for i, parse in enumerate(parses):
        heads, labels = _read(parse)
        places = texts.sides[i][0].places
        wrong = [h for h in heads if h is not None and not -1 <= h < places]
        if len(heads) != places or (labels is not None and len(labels) != places) or wrong:
            raise RegardError(
                f"the parse of text {i} does not fit it",
                got=f"{len(heads)} heads for {places} tokens"
                + (f", and head {wrong[0]}" if wrong else ""),
                accepted="the place of its head for each token the model reads, None for a root",
                do="see the tokens: reader.read(text)",
            )
        for token, head in enumerate(heads):
            if head is None or head in (-1, token):
                continue
            for label in {"all", labels[token] if labels is not None else "all"}:
                found.append(Arc(texts.starts[i], token, head, ("head", label)))
                found.append(Arc(texts.starts[i], head, token, ("dependent", label)))
    return found


def in_batch(arcs: Mapping[int, list[Arc]], batch: Batch) -> list[Arc]:
    """The arcs of the texts of a batch; `text` is the place in it."""
    return [
        arc._replace(text=place)
        for place, text in enumerate(batch.numbers.tolist())
        for arc in arcs.get(text, [])
    ]


class ArcSums:
    """What heads give along arcs, by kind of arc."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[tuple[str, str], Tensor]] = {}
        """By layer and kind: [heads, 3], weight, hits and how many there are to be seen."""
        self.offsets: dict[tuple[str, str], Counter[int]] = {}
        """How often arcs that may be seen span an offset; of the first layer."""

    def add(self, path: str, arcs: Sequence[Arc], found: Float[Tensor, "n h 3"]) -> None:
        first = not self.sums or next(iter(self.sums)) == path
        into = self.sums.setdefault(path, {})
        found = found.double().cpu()
        kinds = {arc.kind for arc in arcs}
        for kind in sorted(kinds):
            at = [i for i, arc in enumerate(arcs) if arc.kind == kind]
            total = found[at].sum(0)
            into[kind] = into[kind] + total if kind in into else total
            if first:
                spans = (arcs[i].query - arcs[i].key for i in at if found[i, 0, 2] > 0)
                self.offsets.setdefault(kind, Counter()).update(spans)

    def table(self) -> Syntax:
        rows = []
        for layer, (path, kinds) in enumerate(self.sums.items()):
            for (towards, relation), total in kinds.items():
                if not self.offsets[towards, relation]:
                    continue
                offset, often = self.offsets[towards, relation].most_common(1)[0]
                many = sum(self.offsets[towards, relation].values())
                for head, (weight, hits, arcs) in enumerate(total.tolist()):
                    if arcs:
                        rows.append(
                            Follows(relation, towards, layer, head, path, weight / arcs,
                                    hits / arcs, often / many, offset, int(arcs))
                        )  # fmt: skip
        return Syntax(tuple(sorted(rows, key=lambda row: row.baseline - row.hits)))


def tensor_of(arcs: Sequence[Arc], device: torch.device) -> Int[Tensor, "n 3"]:
    return torch.tensor([arc[:3] for arc in arcs], dtype=torch.long, device=device).view(-1, 3)


def _read(parse: Any) -> tuple[list[int | None], list[str] | None]:
    if isinstance(parse, str) or not isinstance(parse, (Sequence, Tensor)):
        raise _no_parse(parse)
    two = isinstance(parse, tuple) and len(parse) == 2 and isinstance(parse[0], (list, tuple))
    heads, labels = parse if two else (parse, None)
    listed = heads.tolist() if isinstance(heads, Tensor) else list(heads)
    if not all(head is None or hasattr(head, "__index__") for head in listed):
        raise _no_parse(parse)
    return listed, None if labels is None else [str(label) for label in labels]


def _no_parse(parse: Any) -> RegardError:
    return RegardError(
        "a parse is the place of the head of every token",
        got=described(parse),
        accepted="whole numbers, None for a root; or these and the labels: ([1, None], [...])",
    )
