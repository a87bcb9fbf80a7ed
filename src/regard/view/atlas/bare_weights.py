"""Weights that are looked at without a trace: tensors, and what a model gave as its attentions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from regard.errors import RegardError
from regard.seen import Seen
from regard.traces import Trace

Weights = Tensor | Sequence[Tensor] | Sequence[Sequence[Tensor]]
"""[queries, keys], [heads, …] or [batch, heads, …]; or such a tensor for each layer, as a model of
transformers gives for output_attentions=True; or, while it generates, such a tuple for each step.
"""


def looked_at(what: Any) -> Any:
    """A trace in place of a tensor, what was seen in place of several; all else as it is.

    >>> import torch
    >>> looked_at((torch.eye(3), torch.eye(3)))
    layer  calls  heads  max logit           entropy   on first key  empty  broken
    0          1      1          0  0.00 (0.00–0.00)  33% (33%–33%)     0%       0
    1          1      1          0  0.00 (0.00–0.00)  33% (33%–33%)     0%       0
    """
    if isinstance(what, Tensor):
        return _trace(what)
    if not isinstance(what, (tuple, list)) or not what:
        return what
    steps = what if isinstance(what[0], (tuple, list)) else [what]
    seen = Seen()
    for number, step in enumerate(steps):
        for path, weights in enumerate(step):
            if weights is not None:
                seen.layer(str(path)).take(_trace(weights), 0, number, keep=True)
    if not len(seen):
        raise RegardError(
            "these attentions hold no weights",
            got=f"{len(what)} × None",
            do='load the model with attn_implementation="regard" or "eager"',
        )
    return seen


def _trace(weights: Any) -> Trace:
    known = getattr(weights, "source", None)
    if isinstance(known, Trace):
        # Weights of ours that nobody has worked out yet.
        return known
    several = isinstance(weights, Tensor) and weights.ndim == 3
    return Trace.of_weights(weights[None] if several else weights)
