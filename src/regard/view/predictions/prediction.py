"""The likeliest tokens at a place, before and after parts of the model are switched off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from regard.interpret.interventions import Intervention
from regard.view.predictions.predictor import Predictor

TOP = 10
"""Tokens that are told."""
CONTEXT = 12
"""Tokens before the place that are told with it."""


def prediction(
    predictor: Predictor,
    at: int,
    changes: Sequence[Intervention] | None = None,
    known: dict[int, Float[Tensor, "v"]] | None = None,
) -> dict[str, Any]:
    """What the model says follows the token at a place: the likeliest tokens with their
    probabilities, and where the token that does follow stands among all; with changes, both before
    and after them. `known` keeps what the unchanged model said of the place asked last."""
    ids, known = predictor.until(at), {} if known is None else known
    before = known.get(at)
    if before is None:
        before = predictor.logits(ids).double().softmax(-1)
        known.clear()
        known[at] = before
    after = None if changes is None else before
    if changes:
        after = predictor.logits(ids, changes).double().softmax(-1)
    most = before if after is None else before.maximum(after)
    first = most.topk(min(TOP, len(most))).indices.tolist()
    follows = predictor.ids[0, at + 1 : at + 2].tolist()
    spelled = predictor.reader.spelled
    rows = [_row(token, spelled([token])[0], before, after) for token in first]
    return {
        "at": at,
        "places": predictor.places,
        "context": spelled(ids[0, -CONTEXT:].tolist()),
        "tokens": rows,
        "next": _row(follows[0], spelled(follows)[0], before, after) if follows else None,
        "moved": None if after is None else _distance(before, after),
    }


def _row(
    token: int, text: str, before: Float[Tensor, "v"], after: Float[Tensor, "v"] | None
) -> dict[str, Any]:
    row = {"id": token, "token": text, "before": _place(before, token)}
    return row if after is None else row | {"after": _place(after, token)}


def _place(shares: Float[Tensor, "v"], token: int) -> dict[str, Any]:
    share = shares[token]
    return {"probability": float(share), "rank": 1 + int((shares > share).sum())}


def _distance(before: Float[Tensor, "v"], after: Float[Tensor, "v"]) -> float:
    """How far the prediction moved: half the sum of what was gained and lost, from 0 to 1."""
    return float((before - after).abs().sum() / 2)
