"""How well scores rank what tokens did: each method, and what knows nothing of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.interpret.faithfulness_report.controls import positions, shuffled
from regard.interpret.faithfulness_report.rank_correlation import (
    Interval,
    between,
    over_texts,
    over_tokens,
    spearman,
    top_share,
)
from regard.interpret.faithfulness_report.token_scores import TokenScores

NOISE = 4e-6
"""Effects up to this share of the metric, or of 1, are rounding, and count as none."""
NONE = Interval(math.nan, math.nan, math.nan)


class Row(NamedTuple):
    """How well one kind of score ranks tokens by what cutting their edges does."""

    name: str
    correlation: Interval
    """Of ranks, with the size of the effect; the mean over texts."""
    top: float
    """The share of all effect on the fifth of tokens with the largest scores."""
    beyond: Interval
    """The correlation less that of position alone, on the same tokens or texts."""
    control: bool


def compared(texts: Sequence[TokenScores], seed: int) -> list[Row]:
    """A row for each method, then those of controls: position, shuffled weights, equal scores."""
    effects = [size_of_effect(text) for text in texts]
    by_place = [positions(len(effect)) for effect in effects]
    methods, kinds = list(texts[0].scores), list(by_place[0])
    every = [
        torch.stack([*text.scores.values(), *places.values()])
        for text, places in zip(texts, by_place, strict=True)
    ]
    each = torch.stack(
        [spearman(s, e.expand_as(s)) for s, e in zip(every, effects, strict=True)], 1
    )
    # The kind of position that does best: a control should not be made weak.
    means = each[len(methods) :].nanmean(1).nan_to_num(-1)
    best = len(methods) + int(means.argmax())
    if len(texts) > 1:
        found, beyond = over_texts(each, seed), over_texts(each - each[best], seed)
    else:
        found, again = over_tokens(every[0], effects[0], seed)
        beyond = [
            between(row - again[best], float(each[i, 0] - each[best, 0]))
            for i, row in enumerate(again)
        ]
    tops = _tops(every, effects)
    rows = [
        Row(name, found[i], tops[i], beyond[i], control=False) for i, name in enumerate(methods)
    ]
    rows.append(
        Row(f"position ({kinds[best - len(methods)]})", found[best], tops[best], NONE, True)
    )
    if "weights" in methods:
        rows.append(_chance([text.scores["weights"] for text in texts], effects, seed))
    equal = Interval(0.0 if bool(each.isfinite().any()) else math.nan, math.nan, math.nan)
    return [*rows, Row("all tokens alike", equal, 0.2, NONE, control=True)]


def size_of_effect(text: TokenScores) -> Float[Tensor, "n"]:
    """What cutting did, without sign and without rounding."""
    size = text.effect.abs()
    return torch.where(size > NOISE * max(1.0, abs(text.value)), size, 0.0)


def _tops(
    every: Sequence[Float[Tensor, "m n"]], effects: Sequence[Float[Tensor, "n"]]
) -> list[float]:
    each = torch.tensor(
        [[top_share(row, e) for row in s] for s, e in zip(every, effects, strict=True)]
    )
    return [float(column) for column in each.nanmean(0)]


def _chance(
    scores: Sequence[Float[Tensor, "n"]], effects: Sequence[Float[Tensor, "n"]], seed: int
) -> Row:
    """What weights give that are shuffled: the interval is that of chance."""
    drawn = shuffled(scores, seed)
    each = torch.stack(
        [spearman(s, e.expand_as(s)) for s, e in zip(drawn, effects, strict=True)]
    ).nanmean(0)
    top = torch.tensor(
        [[top_share(one, e) for one in s[:20]] for s, e in zip(drawn, effects, strict=True)]
    ).nanmean()
    return Row(
        "weights, shuffled", between(each, float(each.nanmean())), float(top), NONE, control=True
    )
