"""A text that goes on, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from regard.errors import RegardError
from regard.interpret.interventions import Intervention
from regard.models.causal import drawn, refuse_long
from regard.view.predictions.predictor import Predictor

MOST = 2000
"""Tokens that are written at once, at most."""
HOTTEST = 10.0


class Written(NamedTuple):
    """A token that was written, and how probable the model held it to be."""

    id: int
    token: str
    probability: float
    ends: bool


def continued(
    predictor: Predictor,
    at: int,
    tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    changes: Sequence[Intervention] = (),
) -> Iterator[Written]:
    """The tokens that follow a place, one after the other: the likeliest, or drawn ones with a
    temperature. The first one is what the model writes there, not what the text has."""
    _check(tokens, temperature, seed)
    ids, memory = predictor.until(at), None
    if predictor.reader.longest is not None:
        refuse_long(ids.shape[1] + tokens, predictor.reader.longest)
    return _steps(predictor, ids, memory, tokens, temperature, seed, changes)


def _steps(
    predictor: Predictor,
    ids: torch.Tensor,
    memory: Any,
    tokens: int,
    temperature: float,
    seed: int,
    changes: Sequence[Intervention],
) -> Iterator[Written]:
    generator = torch.Generator(ids.device).manual_seed(seed)
    for _ in range(tokens):
        logits, memory = predictor.step(ids, memory, changes)
        new = drawn(logits[None], temperature, generator)
        token = int(new)
        share = float(logits.double().softmax(-1)[token])
        spelled = predictor.reader.spelled([token])[0]
        yield Written(token, spelled, share, predictor.ends(token))
        if predictor.ends(token):
            return
        ids = torch.cat([ids, new], 1)


def _check(tokens: int, temperature: float, seed: int) -> None:
    if not 1 <= tokens <= MOST:
        raise RegardError(
            "the number of tokens to generate is out of range",
            got=str(tokens),
            accepted=f"1 to {MOST}",
        )
    if not (math.isfinite(temperature) and 0 <= temperature <= HOTTEST):
        raise RegardError(
            "temperature divides the logits",
            got=f"{temperature:g}",
            accepted=f"0 (always the likeliest) to {HOTTEST:g}",
        )
    if not 0 <= seed < 2**63:
        raise RegardError("seed is a number to draw from", got=str(seed), accepted="0 to 2^63 - 1")
