"""QK-clip: queries and keys of a head are scaled down when its largest logit passes a threshold.

After an optimiser's step, a head whose largest logit S was above τ has its query and key
projections multiplied by √(τ/S) each, so that the same inputs would give logits of at most τ. Heads
within the threshold are not touched (Kimi K2, arXiv 2507.20534).

Where query heads share a key head, the key head can be scaled only by what all of them need. With
γ_h = τ/S_h, and 1 for heads within the threshold, it takes the square root of the largest γ in its
group, and each query head the rest of its own: no head gets more or less than its γ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.biases.dense import Dense
from regard.errors import RegardError
from regard.scores.comparison import Dot
from regard.traces import Trace
from regard.watching.projections import Find, check, projections, scale_


class Kind(NamedTuple):
    """What QK-clip has to know of a call, apart from its logits."""

    heads: int
    width: int
    trouble: str
    """Why its logits do not follow the scale of queries and keys, if they do not."""

    @staticmethod
    def of(trace: Trace) -> Kind:
        x = trace.inputs
        if not isinstance(x.comparison, Dot):
            trouble = f"its score is {type(x.comparison).__name__}, no product of query and key"
        elif x.softcap is not None:
            trouble = f"softcap={x.softcap:g} bounds its logits already"
        elif x.bias is not None and not _only_hides(x.bias):
            trouble = "a bias is part of its logits, and would not be scaled"
        else:
            trouble = ""
        return Kind(x.shape.H, x.q.shape[-1], trouble)


@dataclass(frozen=True)
class QKClip:
    """Keep the largest logit of every head at or below `threshold`, by scaling its projections.

    `layers` names the modules to clip (`*` matches anything), all by default. `projections` is a
    function of (path, module) that gives `Projections` where names do not tell; None leaves a
    module to its names.
    """

    threshold: float = 100.0
    layers: Sequence[str] | None = None
    projections: Find | None = None

    def __post_init__(self) -> None:
        if not 0 < self.threshold < float("inf"):
            raise RegardError(
                "QK-clip has a threshold for logits",
                got=str(self.threshold),
                accepted="a number above 0, often 100",
            )

    def wants(self, path: str) -> bool:
        return self.layers is None or any(fnmatch(path, name) for name in self.layers)

    def clip(
        self, path: str, module: nn.Module, kind: Kind, max_logit: Float[Tensor, "h"]
    ) -> Float[Tensor, "h"]:
        """Scale what passed the threshold. Gives 1 for heads that were scaled, 0 for others."""
        if kind.trouble:
            raise RegardError(
                "QK-clip cannot hold the logits of this module",
                got=f"{type(module).__name__} at {path!r}: {kind.trouble}",
                accepted="logits that are scaled products of queries and keys",
                do="leave it out: QKClip(layers=...)",
            )
        found = None if self.projections is None else self.projections(path, module)
        if found is None:
            found = projections(path, module, kind.heads, kind.width)
        else:
            check(path, module, found, kind.heads)
        share = torch.where(max_logit > self.threshold, self.threshold / max_logit, 1.0)
        key_heads = len(found.k[0])
        keys = share.unflatten(0, (key_heads, -1)).amax(1).sqrt()
        scale_(found.k, keys)
        scale_(found.q, share / keys.repeat_interleave(kind.heads // key_heads))
        return (share < 1).to(max_logit.dtype)


def _only_hides(bias: object) -> bool:
    """Whether a bias is a float mask: 0 where a pair may be seen, hugely negative where not. Looked
    at once for a module, since it waits for the device."""
    return isinstance(bias, Dense) and bool(((bias.tensor == 0) | (bias.tensor <= -1e4)).all())
