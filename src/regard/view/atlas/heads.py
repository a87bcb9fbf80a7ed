"""Numbers for every head of a model: how spread it looks, how much of it the first key takes, how
far it looks, and its largest logit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regard.arguments import described
from regard.errors import RegardError
from regard.interpret.head_scores.pairs.weight_blocks import (
    blocks,
    distances,
    entropy_sums,
    seeing_rows,
)
from regard.seen import Layer, Seen
from regard.traces import Trace
from regard.view.atlas.bare_weights import Weights, looked_at

Statistic = Literal["entropy", "sink", "distance", "logit"]
STATISTICS: tuple[Statistic, ...] = ("entropy", "sink", "distance", "logit")
ROWS = 512

Grid = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class HeadFigures:
    """A number for every head of every layer; NaN where it cannot be known."""

    paths: tuple[str, ...]
    entropy: Grid
    """How spread rows are: 0 on one key, 1 alike on all that may be seen. In nats where only
    statistics were kept."""
    sink: Grid
    """The mean share of a row that falls on the first key."""
    distance: Grid
    """How many places lie between a query and what it looks at, on average."""
    normalised: bool = True
    """Whether entropy is a share of the most it could be: where traces were kept."""
    logit: Grid = ()
    """The largest logit; empty where it was not asked for."""

    @property
    def shown(self) -> tuple[Statistic, ...]:
        """What is shown where nobody says: of statistics alone the largest logit, as no distance
        is known."""
        return ("entropy", "sink", "distance" if self.normalised else "logit")

    def knows(self, statistic: Statistic) -> bool:
        """Whether there is a number of any head."""
        return any(not math.isnan(value) for row in self.of(statistic) for value in row)

    @property
    def heads(self) -> int:
        """The most heads of a layer."""
        return max(map(len, self.entropy))

    def of(self, statistic: Statistic) -> Grid:
        grid: Grid = getattr(self, statistic)
        return grid or tuple((math.nan,) * len(row) for row in self.entropy)


def head_figures(
    what: Seen | Trace | Weights, progress: Callable[[int, int], None] | None = None
) -> HeadFigures:
    """The numbers of every head of a model, or of one trace, over all its calls.

    Entropy is divided by the log of how many keys each row may see, as `Monitor` divides it. The
    distance is that of 512 rows, evenly spaced, where there are more. `progress` is told how many
    layers are done, of how many.

    >>> import regard, torch
    >>> x = torch.zeros(1, 2, 4, 8)
    >>> found = head_figures(regard.trace(x, x, x, mask=regard.masks.causal()))
    >>> for grid in (found.entropy, found.sink, found.distance):
    ...     torch.tensor(grid)
    tensor([[1., 1.]])
    tensor([[0.5208, 0.5208]])
    tensor([[0.7500, 0.7500]])
    """
    seen = looked_at(what)
    if isinstance(seen, Trace):
        layer = Layer("")
        layer.take(seen.detach(), 0, keep=True)
        layers = {"": layer}
    elif isinstance(seen, Mapping):
        layers = dict(seen)
    else:
        raise RegardError(
            "there is nothing to look at",
            got=described(seen),
            accepted="a trace, what watch saw, or weights",
        )
    if not layers:
        raise RegardError("no attention was seen", do="run the model while it is watched")
    traced = all(len(layer.traces) for layer in layers.values())
    entropy, sink, distance, logit = [], [], [], []
    for done, layer in enumerate(layers.values()):
        sink.append(_numbers(layer.first))
        # A head whose rows all see nothing has no logit.
        most = layer.max_logit
        logit.append(_numbers(most.masked_fill(most == -math.inf, math.nan)))
        if traced:
            spread, far = _from_traces(layer)
            entropy.append(_numbers(spread))
            distance.append(_numbers(far))
        else:
            entropy.append(_numbers(layer.entropy))
            distance.append((math.nan,) * layer.heads)
        if progress is not None:
            progress(done + 1, len(layers))
    return HeadFigures(
        tuple(layers), tuple(entropy), tuple(sink), tuple(distance), traced, tuple(logit)
    )


@torch.no_grad()
def _from_traces(layer: Layer) -> tuple[Float[Tensor, "h"], Float[Tensor, "h"]]:
    """Normalised entropy and distance of each head."""
    entropy = room = far = rows = torch.zeros((), dtype=torch.float64)
    for trace in layer.traces:
        spread, most = entropy_sums(trace)
        entropy, room = entropy + spread.sum(0).cpu(), room + most.sum(0).cpu()
        total, count = _distances(trace)
        far, rows = far + total, rows + count
    # A row that may see one key only has no room to be spread in.
    return entropy / room.clamp_min(1e-12), far / rows.clamp_min(1)


def _distances(trace: Trace) -> tuple[Tensor, Tensor]:
    """How far the rows of each head look, added up, and how many rows that were."""
    Q, H, seeing = trace.inputs.shape.Q, trace.inputs.shape.H, seeing_rows(trace)
    device = trace.inputs.q.device
    chosen = torch.linspace(0, Q - 1, min(Q, ROWS), device=device, dtype=torch.float64).long()
    total = torch.zeros(H, dtype=torch.float64)
    for block in blocks(trace, chosen):
        away = distances(trace.inputs, block)
        rows = (block.weights * away).sum(-1).masked_fill(~seeing[:, :, block.queries], 0.0)
        total += rows.double().sum((0, 2)).cpu()
    return total, seeing[:, :, chosen].sum((0, 2)).cpu()


def _numbers(values: Tensor) -> tuple[float, ...]:
    return tuple(map(float, values.tolist()))
