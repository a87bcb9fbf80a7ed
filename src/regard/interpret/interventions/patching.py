"""What becomes of a metric when heads are given what they had for another text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from regard.arguments import flag
from regard.errors import RegardError
from regard.interpret.interventions.activations import WHATS, Patched, What
from regard.interpret.interventions.edges import refuse_ends_in_padding
from regard.interpret.interventions.effects import Effects
from regard.interpret.interventions.experiment import (
    Clean,
    Experiment,
    Metrics,
    Planned,
    Progress,
    heads_named,
    same_lengths,
)
from regard.interpret.interventions.intervention import Intervention
from regard.interpret.interventions.runs import items
from regard.traces import Chosen


def patch(
    model: nn.Module,
    texts: Any,
    sources: Any,
    metric: Metrics,
    *,
    what: What = "outputs",
    heads: Sequence[Any] | None = None,
    layers: str | Sequence[str] = "*",
    places: Chosen = None,
    frozen: bool = False,
    batch: int | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> Effects:
    """What a metric of texts becomes when heads are given what they had for other texts.

    `sources` are those others, one for each text and of the same length: for example, the same
    question about someone else. `what` is what a head is given: its `"outputs"`, `"queries"`,
    `"keys"` or `"values"`, at all places or at some, or its `"patterns"`: it then looks where it
    looked in the source, and reads what is there now. `heads`, `layers`, `metric` and `frozen` are
    as in `ablate`.

    `recovered` is the effect as a share of the way from the metric of the texts to that of their
    sources: 100 % if the head alone carries the difference.

    >>> import torch
    >>> from regard import interpret
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    >>> texts, sources = torch.randn(2, 8, 5, 16)
    >>> found = interpret.patch(model, texts, sources, lambda output: output[:, -1, 0])
    >>> len(found), found.texts
    (2, 8)
    """
    frozen = flag("frozen", frozen)
    if what not in WHATS:
        raise RegardError(
            "what= is what a head is given",
            got=repr(what),
            accepted=", ".join(repr(one) for one in WHATS),
        )
    experiment, others = Experiment(model, texts, metric, batch, progress), items(sources)
    if len(others) != len(experiment.texts):
        raise RegardError(
            "every text needs its source",
            got=f"{len(experiment.texts)} texts, {len(others)} sources",
        )
    for i, (text, other) in enumerate(zip(experiment.texts, others, strict=True)):
        refuse_ends_in_padding(text, places)
        if not same_lengths(text, other):
            raise RegardError(
                "a text and its source need the same number of tokens",
                got=f"text {i} of another shape than its source",
            )

    def plan(i: int, text: Any, clean: Clean) -> list[Planned]:
        source = Clean(experiment.runner, others[i], activations=True).activations
        before: list[Intervention] = []
        if frozen:
            before = [Patched(clean.every(), "patterns", clean.activations)]
        return [
            Planned(heads_named(some), some, [*before, Patched(some, what, source, places)])
            for some in clean.chosen(layers, heads)
        ]

    return experiment.run(f"{what} patched", plan, activations=frozen, sources=others, seed=seed)
