"""The tokens of a text: what methods say of each, and what cutting its edges does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import RegardError
from regard.interpret.attribution.methods import LEARNED, Method, attribute
from regard.interpret.attribution.output_projections import Output
from regard.interpret.interventions.edges import Softmax
from regard.interpret.interventions.knockout import knock_out

Cuts = Literal["token", "last"]
SCORED: tuple[Method, ...] = ("weights", "norms", "rollout", "gradients")
FEWEST = 4
"""Tokens before the last, below which there is nothing to rank."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Of the tokens of one text but the last, which is the one that looks."""

    words: tuple[str, ...]
    value: float
    """The metric of the unchanged model."""
    effect: Float[Tensor, "n"]
    """What cutting a token's edges adds to it."""
    scores: Mapping[str, Float[Tensor, "n"]]
    """What each method says, without sign."""


def token_scores(
    model: nn.Module,
    text: Any,
    metric: Any,
    methods: Sequence[Method],
    *,
    softmax: Softmax,
    cuts: Cuts,
    layers: str | Sequence[str],
    words: Sequence[str] | None,
    output: Output | None,
    batch: int | None,
) -> TokenScores:
    """What methods say of each token, and what cutting its edges does to the metric."""
    _refuse_padding(text)
    scores: dict[str, Tensor] = {}
    n = 0
    for method in methods:
        # Derivatives go through the rows whose edges are cut; the others are read off the last.
        queries = None if method in LEARNED and cuts == "token" else -1
        found = attribute(
            model, text, metric if method in LEARNED else None, method=method, queries=queries,
            layers=layers, output=output,
        )  # fmt: skip
        heads = sum(t.shape[1] for t in found.heads.values())
        each = found.tokens / heads if method == "weights" else found.tokens
        n = _length(each)
        scores[method] = each[0, : n - 1].abs().double().cpu()
    edges = [(range(j + 1, n) if cuts == "token" else -1, j) for j in range(n - 1)]
    found_effects = knock_out(
        model, [text], metric, edges, layers=layers, softmax=softmax, batch=batch
    )
    effect = torch.tensor([row.effect for row in found_effects], dtype=torch.float64)
    _refuse_no_numbers(found_effects[0].clean, effect, scores)
    named = [str(j) for j in range(n)] if words is None else list(words)
    if len(named) != n:
        raise RegardError("words= names every token", got=f"{len(named)} words for {n} tokens")
    return TokenScores(tuple(named), found_effects[0].clean, effect, scores)


def _refuse_padding(text: Any) -> None:
    """Padding would be ranked as tokens without effect, and might be the last place itself."""
    mask = text.get("attention_mask") if isinstance(text, Mapping) else None
    if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()):
        raise RegardError(
            "each text is one sequence, without padding",
            got=f"an attention_mask that leaves out {int((mask == 0).sum())} of {mask.numel()} "
            "tokens",
            do="give each text by itself, as long as it is",
        )


def _refuse_no_numbers(value: float, effect: Tensor, scores: Mapping[str, Tensor]) -> None:
    """What is NaN has no rank, and beside an infinite metric every effect would be rounding."""
    named = {"the effect of cutting token": effect}
    named |= {f"the score by {method!r} of token": score for method, score in scores.items()}
    lost = [f"{name} {int(t.isnan().nonzero()[0])} is NaN" for name, t in named.items()
            if bool(t.isnan().any())]  # fmt: skip
    if not math.isfinite(value):
        lost = [f"the metric of the unchanged model is {value}"]
    if lost:
        raise RegardError(
            "tokens are ranked by numbers",
            got=lost[0],
            accepted="a metric that is finite for the unchanged model, and a number for each cut",
            do="see whether the model gives NaN for this text, or take another metric",
        )


def _length(tokens: Float[Tensor, "b n"]) -> int:
    B, n = tokens.shape
    if B > 1:
        raise RegardError(
            "each text is one sequence",
            got=f"a batch of {B}",
            do="give a list with one text for each: list(texts.split(1))",
        )
    if n <= FEWEST:
        raise RegardError(
            "too few tokens to rank", got=f"{n} tokens", accepted=f"{FEWEST + 1} or more"
        )
    return n
