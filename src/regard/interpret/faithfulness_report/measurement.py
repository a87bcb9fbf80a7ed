"""Measuring whether attention weights point at what decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.interpret import metrics
from regard.interpret.attribution.methods import METHODS, Method
from regard.interpret.attribution.output_projections import Output
from regard.interpret.faithfulness_report.comparison import compared
from regard.interpret.faithfulness_report.report import Faithfulness
from regard.interpret.faithfulness_report.token_scores import SCORED, Cuts, token_scores
from regard.interpret.interventions.edges import Softmax
from regard.interpret.interventions.experiment import Progress
from regard.interpret.interventions.runs import Runner, items


def faithfulness(
    model: nn.Module,
    texts: Any,
    metric: Any = None,
    *,
    methods: Sequence[Method] | None = None,
    softmax: Softmax = "before",
    cuts: Cuts = "token",
    layers: str | Sequence[str] = "*",
    words: Sequence[Any] | None = None,
    output: Output | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> Faithfulness:
    """Whether attention weights point at what decided: how well they, and other scores of tokens,
    rank what cutting each token's edges does to a metric.

    `texts` are one text or a list, each one sequence, as in `ablate`. The metric is the
    log-odds of the token that the model itself says comes next, or any differentiable one.
    Each token but the last is scored: by its weight from the last place, the mean over heads and
    layers; by the length of what was read from it; by rollout; by gradient × attention. Then its
    edges are cut: no later token may look at it (`cuts="token"`), or only the last may not
    (`"last"`); before softmax, when rows look elsewhere instead, or after. Scores are compared with
    the size of that effect by rank correlation, and with what knows nothing of attention: position
    alone, shuffled weights, equal scores.

    `words` are the tokens' names: a list, or one for each text. `output` finds output projections
    for `"norms"`, which is left out where their names are not known.

    >>> import torch
    >>> from regard import interpret, models
    >>> model = models.load("regard-small", device="cpu").model
    >>> found = interpret.faithfulness(model, torch.tensor([[5, 60, 70, 8, 60]]))
    >>> found.verdict.startswith("Here attention weights")
    True
    """
    _check(methods, softmax, cuts)
    runner, several = Runner(model), _apart(texts)
    listed = list(metric) if isinstance(metric, (list, tuple)) else [metric] * len(several)
    if len(listed) != len(several):
        raise RegardError(
            "a metric is one for all texts, or one for each",
            got=f"{len(listed)} metrics for {len(several)} texts",
        )
    named = _named(words, len(several))
    asked, left_out, found = list(SCORED if methods is None else methods), [], []
    for i, text in enumerate(several):
        how: dict[str, Any] = {"softmax": softmax, "cuts": cuts, "layers": layers, "output": output}
        listed[i] = _next_token(runner, text) if listed[i] is None else listed[i]
        given = text, listed[i]
        try:
            one = token_scores(model, *given, asked, words=named[i], batch=batch, **how)
        except RegardError as error:
            # Nobody asked for it by name, and the other methods need no projection.
            if methods is not None or i or "output projection" not in str(error):
                raise
            left_out.append(f"norms ({str(error).splitlines()[0]})")
            asked.remove("norms")
            one = token_scores(model, *given, asked, words=named[i], batch=batch, **how)
        found.append(one)
        if progress is not None:
            progress(i + 1, len(several))
    return Faithfulness(
        metrics.name_of(listed[0]), softmax, cuts, tuple(found), tuple(compared(found, seed)),
        tuple(left_out),
    )  # fmt: skip


def _next_token(runner: Runner, text: Any) -> metrics.Metric:
    """The log-odds of what the model says comes next."""
    logits = metrics.logits_of(runner.run(text))
    return metrics.log_odds(logits[:, -1].argmax(-1))


def _apart(texts: Any) -> list[Any]:
    several = items(texts)
    if len(several) == 1 and isinstance(several[0], Tensor) and len(several[0]) > 1:
        return list(torch.as_tensor(several[0]).split(1))
    return several


def _named(words: Sequence[Any] | None, many: int) -> list[Sequence[str] | None]:
    if words is None:
        return [None] * many
    if many == 1 and all(isinstance(word, str) for word in words):
        return [words]
    if len(words) != many:
        raise RegardError(
            "words= are the tokens of each text", got=f"{len(words)} lists for {many} texts"
        )
    return list(words)


def _check(methods: Sequence[Method] | None, softmax: str, cuts: str) -> None:
    unknown = [one for one in methods or () if one not in METHODS]
    if unknown or (methods is not None and not len(methods)):
        raise RegardError(
            "methods= are ways to score tokens",
            got=", ".join(map(repr, unknown)) or "none",
            accepted=", ".join(map(repr, METHODS)),
        )
    if softmax not in ("before", "after"):
        raise RegardError(
            "softmax= says on which side of it edges are cut",
            got=repr(softmax),
            accepted='"before" (the rest renormalises) or "after" (the value is removed)',
        )
    if cuts not in ("token", "last"):
        raise RegardError(
            "cuts= says which edges to a token are cut",
            got=repr(cuts),
            accepted='"token" (those of all later tokens) or "last" (that of the last one)',
        )
