"""What becomes of a metric when heads are silenced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.arguments import flag
from regard.errors import RegardError
from regard.interpret.interventions.activations import Patched
from regard.interpret.interventions.effects import Effects
from regard.interpret.interventions.experiment import (
    Clean,
    Experiment,
    Metrics,
    Planned,
    Progress,
    heads_named,
)
from regard.interpret.interventions.intervention import Intervention
from regard.interpret.interventions.outputs import Place, Replaced
from regard.interpret.interventions.runs import Runner, items, sequences
from regard.interpret.metrics import real_rows
from regard.traces import Trace

By = Literal["zero", "mean", "resample"]


def ablate(
    model: nn.Module,
    texts: Any,
    metric: Metrics,
    *,
    heads: Sequence[Any] | None = None,
    layers: str | Sequence[str] = "*",
    by: By = "zero",
    reference: Any = None,
    frozen: bool = False,
    batch: int | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> Effects:
    """What a metric becomes when heads are silenced: each head alone, or those that are named.

    `texts` are what the model is called with: a list of tensors of tokens or of dictionaries of
    arguments, or one of them. `metric` is a function of the model's output that gives a number, or
    one for each sequence; one of `interpret.metrics`; or a list with one for each text. `heads` are
    pairs (layer, head), the layers counted among those whose path matches `layers`; a list of pairs
    inside the list is silenced together.

    A silenced head gives `by="zero"` nothing; `by="mean"` the mean of what it gives over all places
    of `reference` (the texts themselves by default), so that the constant part of its output stays;
    `by="resample"` what it gives at the same places of another text. With `frozen=True` all other
    heads look where they looked before, so that only the head's own output is missing, and others
    do not make up for it by looking elsewhere.

    Several interventions run in one batch of at most `batch`, if that was found to change nothing.

    >>> import torch
    >>> from regard import interpret
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    >>> texts = [torch.randn(1, 5, 16) for _ in range(8)]
    >>> found = interpret.ablate(model, texts, lambda output: output[:, -1, 0])
    >>> [row.what for row in found], found[0].each.shape
    (['self_attn head 0', 'self_attn head 1'], torch.Size([8]))
    """
    frozen = flag("frozen", frozen)
    if by not in ("zero", "mean", "resample"):
        raise RegardError(
            "by= is what a silenced head gives",
            got=repr(by),
            accepted='"zero", "mean" or "resample"',
        )
    experiment = Experiment(model, texts, metric, batch, progress)
    others = experiment.texts if reference is None else items(reference)
    donors = _Donors(experiment.runner, others, seed) if by == "resample" else None
    mean = _means(experiment.runner, others) if by == "mean" else None

    def plan(i: int, text: Any, clean: Clean) -> list[Planned]:
        outputs = mean if donors is None else donors.outputs(i, text, same=reference is None)
        before: list[Intervention] = []
        if frozen:
            before = [Patched(clean.every(), "patterns", clean.activations)]
        return [
            Planned(heads_named(some), some, [*before, Replaced(some, outputs)])
            for some in clean.chosen(layers, heads)
        ]

    title = {"zero": "silenced", "mean": "at its mean", "resample": "resampled"}[by]
    return experiment.run(title, plan, activations=frozen, seed=seed)


def _means(runner: Runner, texts: Sequence[Any]) -> dict[Place, Tensor]:
    """The mean output [H, E] of each head, over all rows that see something and are no padding."""
    totals: dict[Place, tuple[Tensor, Tensor]] = {}

    def look(text: Any, place: Place, trace: Trace) -> None:
        seeing = (trace.rows.lse > -torch.inf)[..., None]
        real = real_rows(runner.model, text, place[0], trace)
        if real is not None:
            seeing = seeing & real[:, None, :, None]
        out = trace.rows.out.double().masked_fill(~seeing, 0.0)
        total, count = out.sum((0, 2)), seeing.sum((0, 2))
        before = totals.get(place, (0, 0))
        totals[place] = before[0] + total, before[1] + count

    for text in texts:
        runner.run(text, look=partial(look, text))
    return {place: total / count.clamp_min(1) for place, (total, count) in totals.items()}


class _Donors:
    """For each text, another one whose outputs replace its own."""

    def __init__(self, runner: Runner, texts: Sequence[Any], seed: int) -> None:
        self.runner, self.texts = runner, texts
        self._draw = torch.Generator().manual_seed(seed)

    def outputs(self, i: int, text: Any, *, same: bool) -> dict[Place, Tensor]:
        found: dict[Place, Tensor] = {}

        def look(place: Place, trace: Trace) -> None:
            found[place] = trace.rows.out.detach().clone()

        many = len(self.texts)
        if many == 1 and same:
            if sequences(text) < 2:
                raise RegardError(
                    'by="resample" takes outputs from another text',
                    got="one text",
                    do="give more texts, or others as reference=",
                )
            self.runner.run(text, look=look)
            shift = self._shift(sequences(text))
            return {
                place: out.roll(shift * (len(out) // sequences(text)), 0)
                for place, out in found.items()
            }
        other = (i + self._shift(many)) % many if same else self._shift(many + 1) - 1
        self.runner.run(self.texts[other], look=look)
        return found

    def _shift(self, many: int) -> int:
        return int(torch.randint(1, many, (), generator=self._draw)) if many > 1 else 1
