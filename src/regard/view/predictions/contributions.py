"""What each head gives the logit of a token, read directly."""

from __future__ import annotations

from typing import Any

from regard.errors import RegardError
from regard.interpret import anatomy, direct_logits
from regard.view.atlas import Atlas
from regard.view.predictions.predictor import Predictor


def contributions(predictor: Predictor, atlas: Atlas, at: int, token: int) -> dict[str, Any]:
    """What each head of each map gives the logit of a token at a place, and what all else gives it;
    or in plain words why that cannot be separated in this model."""
    given, reader = predictor.arguments(predictor.until(at)), predictor.reader
    try:
        body = anatomy(reader.model)
    except RegardError as error:
        return _reason(error)
    many = len(body.unembedding)
    if not 0 <= token < many:
        raise RegardError(
            "the vocabulary has no such token", got=str(token), accepted=f"0 to {many - 1}"
        )
    try:
        with predictor.running():
            found = direct_logits(reader.model, given, token, at=-1, anatomy=body)
    except RegardError as error:
        return _reason(error)
    places = {m.name: place for place, m in enumerate(atlas.maps)}
    maps: dict[int, list[float]] = {}
    for part in found.heads().parts:
        if part.path in places:
            maps.setdefault(places[part.path], []).append(float(part.values[0]))
    logit = float(found.logit[0])
    return {
        "why": "",
        "token": reader.spelled([token])[0],
        "logit": logit,
        "rest": logit - sum(sum(values) for values in maps.values()),
        "maps": [{"map": place, "heads": values} for place, values in maps.items()],
    }


def _reason(error: RegardError) -> dict[str, Any]:
    return {"why": str(error).splitlines()[0], "maps": []}
