"""A metric's derivatives by attention weights: at the weights themselves, or integrated from zero
weights up to them.

Integrated gradients scale the weights of layers from 0 to 1 and add up p_ij · ∂m/∂p_ij on the way.
The sum over all pairs is then the metric with the weights less the metric without them. Layers that
are scaled keep the pattern of the unchanged run, so that the path is one of weights alone. (Hao et
al., 2021, after Sundararajan et al., 2017.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.interpret.attribution.probes import Probe, Slopes
from regard.interpret.interventions.outputs import Place


def integrated(
    probe: Probe,
    metric: Any,
    together: Sequence[Sequence[Place]],
    steps: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[Place, Slopes], Float[Tensor, "b"]]:
    """The integrals of the derivatives, for calls that are scaled together; and by how much the
    metric changes along all of these paths."""
    found: dict[Place, Slopes] = {}
    value = probe.value(metric)
    explained = torch.zeros_like(value)
    for i, places in enumerate(together):
        nothing, _ = probe.slopes(metric, dict.fromkeys(places, 0.0))
        explained = explained + value - nothing
        kept: dict[Place, list[Slopes]] = {place: [] for place in places}
        for done, (at, share) in enumerate(zip(*gauss(steps), strict=True), 1):
            _, slopes = probe.slopes(metric, dict.fromkeys(places, at))
            if progress is not None:
                progress(i * steps + done, len(together) * steps)
            for place in places:
                kept[place].append(Slopes(share * slopes[place].g, slopes[place].v))
        # Σ over steps of g·v is one product of longer vectors.
        for place, several in kept.items():
            g, v = (torch.cat(parts, -1) for parts in zip(*several, strict=True))
            found[place] = Slopes(g, v)
    return found, explained


def gauss(steps: int) -> tuple[list[float], list[float]]:
    """Where between 0 and 1 to look, and with which shares, for the integral of a smooth function:
    exact for polynomials of degree 2·steps - 1. (Golub and Welsch, 1969.)

    >>> at, shares = gauss(3)
    >>> round(sum(share * x**5 for x, share in zip(at, shares)), 12) == round(1 / 6, 12)
    True
    """
    k = torch.arange(1, steps, dtype=torch.float64)
    beside = k / (4 * k**2 - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return ((values + 1) / 2).tolist(), vectors[0].square().tolist()
