"""The picture of a subject that a command asks for."""

from __future__ import annotations

from typing import Any

# Before matplotlib itself: where that is missing, this says what to do.
from regard.view.pictures.theme import save  # isort: skip
from matplotlib.figure import Figure

from regard.errors import RegardError
from regard.view.atlas import KEEP
from regard.view.pictures.arc_picture import arcs
from regard.view.pictures.caption import captioned
from regard.view.pictures.trace_pictures import entropy_by_layer, head_grid, heat_map
from regard.view.subjects import Look, two_texts

__all__ = ["drawn", "save"]


def drawn(this: Look) -> Figure:
    """The picture of a subject that was asked for, as a matplotlib figure."""
    wanted, chosen = this.wanted, this.chosen
    model = this.subject.told.model or captioned(this.subject.what)
    if wanted.kind in ("heads", "entropy"):
        assert this.found is not None
        draw = head_grid if wanted.kind == "heads" else entropy_by_layer
        return draw(this.found, title=model, dark=wanted.dark)
    if chosen is None:
        raise RegardError(
            "only statistics were kept: there are no weights to draw",
            got=f"--kind {wanted.kind}",
            accepted="--kind heads or entropy",
            do=f"keep traces: {KEEP}",
        )
    at: dict[str, Any] = {
        "head": "mean",
        "title": " · ".join(filter(None, (model, chosen.name))),
        "dark": wanted.dark,
    }
    apart = chosen.queries if two_texts(chosen.keys, chosen.queries) else None
    if wanted.kind == "arcs" and apart is not None:
        raise RegardError(
            "arcs are drawn over one text",
            got=f"{chosen.name}, whose queries and keys are of two",
            accepted="--kind map",
        )
    if wanted.kind == "arcs":
        return arcs(chosen.trace, chosen.keys, this.place.key, **at)
    return heat_map(chosen.trace, chosen.keys, queries=apart, **at)
