"""Words compared by their spelling: the mechanism of attention, with nothing learned behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from operator import and_

import torch

from regard import masks, scores
from regard.calls.dispatch import trace
from regard.errors import RegardError
from regard.masks import Mask
from regard.scores import Score
from regard.traces import Trace
from regard.view.subjects.model_runs import SPELLING, TextInfo
from regard.view.subjects.subject import Subject
from regard.view.subjects.word_vectors import vectors, words

SENTENCE = "A word attends to words like it: attention reads what readers read and reread."
TOKEN = "reread"


@dataclass(frozen=True)
class Spelling:
    """How words are compared by their spelling."""

    mask: str = "others"
    score: str = "scaled_dot"
    temperature: float = 6.0


def spelled(text: str, how: Spelling, *, example: bool = False) -> Subject:
    """Words compared by their spelling: one layer of one head."""
    tokens = words(text)
    if not tokens:
        raise no_word(text)
    mask, score = _mask(how.mask), _score(how.score, how.temperature)
    x = vectors(tokens)
    unit = {"scaled_dot": 1 / math.sqrt(x.shape[-1]), "dot": 1.0}.get(how.score)
    scale = None if unit is None else unit / how.temperature
    t = trace(x, x, x, mask=mask, score=score, scale=scale)
    many = f"{len(tokens)} word{'s' if len(tokens) > 1 else ''}"
    divided = "" if scale is None else f" / {how.temperature:g}"
    return Subject(
        t,
        tokens,
        f"{many} compared by their spelling; no trained model",
        f"mask={mask!r}, score={score!r}{divided}, backend={t.backend}",
        "word",
        tokens.index(TOKEN) if example else _leaning(t),
        TextInfo(text, SPELLING),
    )


def no_word(text: str) -> RegardError:
    """What is said of a text that has nothing to look at."""
    return RegardError(
        "there is no word in the text",
        got=repr(text[:40]),
        accepted="at least one word",
        do='try: regard view "the words you care about"',
    )


def _mask(names: str) -> Mask | None:
    """A mask by name; several names, with commas between, must all allow a pair."""
    chosen = [mask for mask in map(_one_mask, names.split(",")) if mask is not None]
    return reduce(and_, chosen) if chosen else None


def _one_mask(name: str) -> Mask | None:
    kind, _, size = name.strip().partition(":")
    if kind == "window" and size.isdecimal():
        return masks.window(int(size))
    if size or kind not in ("others", "causal", "full"):
        raise RegardError(
            "unknown mask",
            got=repr(name),
            accepted="others, causal, full or window:N, or several with commas between",
            do="window:3 lets each word see itself and the three before it",
        )
    return {"others": ~masks.window(0), "causal": masks.causal(), "full": None}[kind]


def _score(name: str, temperature: float) -> Score:
    if not 0 < temperature < float("inf"):
        raise RegardError(
            "temperature divides the scores", got=f"{temperature:g}", accepted="a number above 0"
        )
    if name == "cosine":
        return scores.cosine(temperature)
    if name not in ("scaled_dot", "dot"):
        raise RegardError("unknown score", got=repr(name), accepted="scaled_dot, dot or cosine")
    return scores.dot() if name == "dot" else scores.scaled_dot()


def _leaning(t: Trace) -> int:
    """The query that gives most to a single other word."""
    top = t.top(2)
    own = torch.arange(len(top.indices))[:, None]
    return int(torch.where(top.indices == own, 0.0, top.values).amax(-1).argmax())
