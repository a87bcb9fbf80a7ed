"""Runs of a model that are asked about: what each attention call had, and what its output did to a
metric.

The derivative of a metric by an attention weight is one product: with g the derivative by the
output of a head, ∂m/∂p_ij = g_i · v_j. So a run keeps g and v of each call, O(n), and no n×n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import RegardError
from regard.interpret.interventions.intervention import observed
from regard.interpret.interventions.outputs import Place
from regard.interpret.interventions.runs import Runner, arguments
from regard.interpret.metrics import Outcome, differentiable
from regard.traces import Trace
from regard.watching.changed_outputs import Intervening


class Slopes(NamedTuple):
    """What a metric's derivative by the weights of a call is made of: g_i · v_j."""

    g: Float[Tensor, "b h q e"]
    v: Float[Tensor, "b g k e"]


@dataclass(frozen=True, eq=False)
class Clean:
    """The unchanged run: its output, and its calls in order, cut from autograd."""

    output: Any
    calls: Mapping[Place, Trace]


class Probe:
    """A model and a text."""

    def __init__(self, model: Any, text: Any) -> None:
        self.model, self.text = Runner(model).model, text
        calls: dict[Place, Trace] = {}

        def look(path: str, nth: int, trace: Trace) -> None:
            calls[path, nth] = _four_axes(path, trace.detach())

        with torch.no_grad():
            output = self._run(look)
        if not calls:
            raise RegardError("no attention ran", got=f"a run of {type(model).__name__}")
        self.clean = Clean(output, calls)

    def slopes(
        self,
        metric: Any,
        scales: Mapping[Place, float] | None = None,
    ) -> tuple[Float[Tensor, "b"], dict[Place, Slopes]]:
        """A metric, and its derivatives by the outputs of all calls.

        Calls that have a scale look where they looked in the unchanged run, with weights multiplied
        by it.
        """
        kept: dict[Place, tuple[Tensor, Tensor]] = {}
        scales = {} if scales is None else scales

        def handle(path: str, nth: int, trace: Trace) -> Tensor:
            place, out = (path, nth), trace.rows.out
            if place in scales:
                then = self.clean.calls[place].inputs
                same = replace(trace.inputs, q=then.q, k=then.k)
                out = scales[place] * observed(same).out.to(out.dtype)
            # A leaf of its own: the model's parameters may be frozen.
            added = torch.zeros_like(out, requires_grad=True)
            kept[place] = added, trace.inputs.v.detach()
            return out + added

        with torch.enable_grad():
            output = self._run(handle)
            values = differentiable(metric, Outcome(output, self.text, self.clean.output))
            if not values.requires_grad:
                raise RegardError(
                    "the metric does not depend on what attention gives, or was cut from autograd",
                    got="a value without gradient",
                    accepted="a differentiable function of the model's output",
                    do="leave out detach(), item() and argmax(); see that the model does not run "
                    "under torch.no_grad()",
                )
            leaves = [added for added, _ in kept.values()]
            found = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
        slopes = {
            place: Slopes(torch.zeros_like(added) if g is None else g, v)
            for (place, (added, v)), g in zip(kept.items(), found, strict=True)
        }
        return values.detach(), slopes

    def value(self, metric: Any) -> Float[Tensor, "b"]:
        """The metric of the unchanged run."""
        return differentiable(
            metric, Outcome(self.clean.output, self.text, self.clean.output)
        ).detach()

    def _run(self, handle: Callable[[str, int, Trace], Tensor | None]) -> Any:
        args, kwargs = arguments(self.text)
        with Intervening(self.model, handle):
            return self.model(*args, **kwargs)


def _four_axes(path: str, trace: Trace) -> Trace:
    """The same call as [B, H, N, D]."""
    if len(trace.inputs.lead) > 1:
        raise RegardError(
            f"{path!r} attends with more axes than batch and heads",
            got=f"{list(trace.inputs.lead)} before the heads",
            accepted="[B, H, N, D]",
        )
    return replace(trace, inputs=replace(trace.inputs, rank=4, lead=()))
