"""Interventions one after another, on every text: what they do to a metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import RegardError
from regard.interpret.interventions.activations import Activations
from regard.interpret.interventions.effects import Effects, effects
from regard.interpret.interventions.intervention import Heads, Intervention, UnevenBatchError
from regard.interpret.interventions.outputs import Place
from regard.interpret.interventions.runs import Runner, arguments, at_once, items, parts
from regard.interpret.metrics import Outcome, measured, name_of
from regard.interpret.rows import matching, numbered
from regard.traces import Trace

Progress = Callable[[int, int], None]
"""Called with the number of runs done, and of all."""
Metrics = Any
"""A function of the model's output, a `Metric`, or a list of one for each text."""
NEAR = 0.01
"""What an effect in a batch may differ by from that alone, as a share of it, beside rounding."""
ROUNDING = 1e-5
"""What the metric may differ by, as a share of it, in float32; more in lower precision."""


class Planned(NamedTuple):
    """One row of the table: what is done, to which heads."""

    what: str
    heads: Heads
    interventions: Sequence[Intervention]


class Clean:
    """A run of the unchanged model: its output, and what its layers had and gave."""

    def __init__(self, runner: Runner, text: Any, *, activations: bool = False) -> None:
        self.sizes: dict[str, int] = {}
        """How many heads each layer has, in the order of the calls."""
        self.activations: dict[Place, Activations] = {}

        def look(place: Place, trace: Trace) -> None:
            self.sizes[place[0]] = trace.inputs.shape.H
            if activations:
                self.activations[place] = Activations.of(trace)

        self.output = runner.run(text, look=look)

    def every(self) -> dict[str, list[int]]:
        return {path: list(range(many)) for path, many in self.sizes.items()}

    def chosen(self, layers: str | Sequence[str], heads: Any) -> list[dict[str, list[int]]]:
        """The heads to look at: each apart, those of a list inside together."""
        sizes = {path: self.sizes[path] for path in matching(self.sizes, layers)}
        if heads is None:
            return [{path: [head]} for path, many in sizes.items() for head in range(many)]
        if not isinstance(heads, Sequence) or not heads:
            numbered(sizes, heads if isinstance(heads, Sequence) else [heads])
        return [
            numbered(sizes, [one] if len(one) == 2 and isinstance(one[0], int) else one)
            if isinstance(one, Sequence)
            else numbered(sizes, [one])
            for one in heads
        ]


Plan = Callable[[int, Any, Clean], list[Planned]]
"""What is done to a text: its number, the text, and the unchanged run."""


class Experiment:
    """A model, texts, and a metric."""

    def __init__(
        self, model: Any, texts: Any, metric: Metrics, batch: int | None, progress: Progress | None
    ) -> None:
        self.runner, self.texts = Runner(model), items(texts)
        listed = metric if isinstance(metric, (list, tuple)) else [metric] * len(self.texts)
        if len(listed) != len(self.texts) or not listed:
            raise RegardError(
                "a metric is one for all texts, or one for each",
                got=f"{len(listed)} metrics for {len(self.texts)} texts",
            )
        self.metrics, self.batch, self.progress = list(listed), batch, progress
        self._batched = True

    def run(
        self,
        title: str,
        plan: Plan,
        *,
        activations: bool = False,
        sources: Sequence[Any] | None = None,
        seed: int = 0,
    ) -> Effects:
        """The table. `sources` are the texts that are patched from, for their own metric."""
        clean, changed, target = [], [], []
        named: list[tuple[str, Heads]] = []
        for i, (text, metric) in enumerate(zip(self.texts, self.metrics, strict=True)):
            run = Clean(self.runner, text, activations=activations)
            planned = plan(i, text, run)
            named = named or [(one.what, one.heads) for one in planned]
            if len(planned) != len(named):
                raise RegardError(
                    "every text needs the same number of interventions",
                    got=f"{len(named)} for the first, {len(planned)} for text {i}",
                )
            own = measured(metric, Outcome(run.output, text, run.output))
            found = self._measured(i, text, metric, run, planned, own)
            clean.append(own)
            changed.append(found)
            if sources is not None:
                output = self.runner.run(sources[i])
                target.append(measured(metric, Outcome(output, sources[i], run.output)))
        return effects(
            title,
            name_of(self.metrics[0]),
            named,
            torch.cat(clean),
            torch.cat(changed, 1),
            torch.cat(target) if target else None,
            seed,
        )

    def _measured(
        self,
        i: int,
        text: Any,
        metric: Any,
        clean: Clean,
        planned: Sequence[Planned],
        own: Float[Tensor, "b"],
    ) -> Float[Tensor, "interventions b"]:
        """The metric of one text under each intervention."""
        found: list[Tensor] = []
        while len(found) < len(planned):
            many = at_once(text, self.batch) if self._batched else 1
            some = planned[len(found) : len(found) + many]
            values = self._together(text, metric, clean, some)
            if values is not None and len(some) > 1 and i == 0 and not found:
                values = self._verified(text, metric, clean, some, values, own)
            if values is None:
                # Its batch entries are not told apart, or not independent.
                self._batched = False
                continue
            found += values
            if self.progress is not None:
                self.progress(i * len(planned) + len(found), len(self.texts) * len(planned))
        if not found:
            raise RegardError("there is nothing to do", got="no interventions")
        return torch.stack(found)

    def _together(
        self, text: Any, metric: Any, clean: Clean, some: Sequence[Planned]
    ) -> list[Float[Tensor, "b"]] | None:
        try:
            output = self.runner.run(text, [one.interventions for one in some])
        except UnevenBatchError:
            # Its sequences are along another axis than the first.
            return None
        outputs = parts(output, len(some))
        if outputs is None:
            return None
        return [measured(metric, Outcome(one, text, clean.output)) for one in outputs]

    def _verified(
        self,
        text: Any,
        metric: Any,
        clean: Clean,
        some: Sequence[Planned],
        values: list[Tensor],
        own: Tensor,
    ) -> list[Tensor] | None:
        """Values of a batch, if the intervention that did most does the same alone. A model whose
        batch entries depend on each other, or are laid out otherwise, would give itself away."""
        moved = torch.stack([(value - own).abs().max() for value in values]).nan_to_num(torch.inf)
        # Of equals the last: a metric that reads the first entry of the batch finds it for all.
        most = int((moved == moved.max()).nonzero()[-1])
        single = self._together(text, metric, clean, [some[most]])
        assert single is not None
        (alone,), there = single, values[most]
        if alone.shape != there.shape:
            return None
        size = torch.maximum(alone.abs(), own.abs())
        allowed = NEAR * (alone - own).abs() + self.runner.rounding(ROUNDING) * size
        near = ((alone - there).abs() <= allowed) | (alone.isnan() & there.isnan())
        return values if near.all() else None


def heads_named(heads: Heads) -> str:
    """Heads as a table names them."""
    every = [f"{path or '(model)'} head {head}" for path, some in heads.items() for head in some]
    shown = ", ".join(every[:3])
    return shown if len(every) <= 3 else f"{shown}, … ({len(every)} heads)"


def same_lengths(text: Any, other: Any) -> bool:
    """Whether two texts have tensors of the same shapes."""
    one, two = ([*args, *kwargs.values()] for args, kwargs in map(arguments, (text, other)))
    shapes = [[t.shape for t in each if isinstance(t, Tensor)] for each in (one, two)]
    return shapes[0] == shapes[1]
