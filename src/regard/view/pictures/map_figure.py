"""A head of an atlas as a file for papers."""

from __future__ import annotations

import io

# Before matplotlib itself: where that is missing, this says what to do.
from regard.view.pictures.theme import write  # isort: skip

from regard.errors import RegardError
from regard.view.atlas import Atlas
from regard.view.pictures.trace_pictures import heat_map

WIDE = 180.0
"""Millimetres: both columns of a journal, and the most that a short text is drawn."""
SHORT = 85.0
FEW = 16
"""Tokens that fit into one column."""


def pdf(atlas: Atlas, place: int, head: int) -> bytes:
    """A head as a PDF as wide as a journal's page, or one column of it; its fonts are inside."""
    of = atlas[place]
    if len(of.calls) > 1:
        raise RegardError(
            "this text was generated in steps that cannot be joined into one trace",
            got=f"{len(of.calls)} calls",
            do="draw one of them: regard.view.picture.heat_map(seen, call=...)",
        )
    name = f"{of.name}, head {head}"
    figure = heat_map(
        of.head(head, of.calls[0]),
        of.keys,
        queries=of.queries,
        title=" · ".join(filter(None, (atlas.model, name))),
    )
    file = io.BytesIO()
    write(figure, file, ".pdf", width=SHORT if max(of.shape[1:]) <= FEW else WIDE)
    return file.getvalue()
