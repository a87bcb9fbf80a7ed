"""QK-clip: queries and keys of a head are scaled down when its largest logit passes a threshold.

After an optimiser's step, a head whose largest logit S was above τ has its query and key
projections multiplied by √(τ/S) each, so that the same inputs would give logits of at most τ. Heads
within the threshold are not touched (Kimi K2, arXiv 2507.20534).

Where query heads share a key head, the key head can be scaled only by what all of them need. With
γ_h = τ/S_h, and 1 for heads within the threshold, it takes the square root of the largest γ in its
group, and each query head the rest of its own: no head gets more or less than its γ. In multi-head
latent attention all heads share the rotated part of their keys: the queries of that part take all
of γ. Weights that serve queries and keys alike, or several layers, are scaled once: layers that
share them all are clipped together, by the largest logit of any.

Only what is trained is changed. Where the keys are frozen, whole or in part, the queries take all
of γ, and the other way round; where neither side is trained whole, as with LoRA on a frozen weight,
W + B·A cannot be scaled by B·A alone, and the module is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.biases.dense import Dense
from regard.errors import RegardError
from regard.monitoring.projections import (
    Find,
    Frozen,
    Projections,
    attends_by_name,
    check,
    memory,
    named,
    projections,
    refuse_norms,
    refuse_shared,
    scale_,
    settle,
    shared_in_part,
    together,
    trained,
    whole,
)
from regard.scores.comparison import Dot
from regard.traces import Trace


def patterns(layers: Any) -> tuple[str, ...] | None:
    """Patterns of paths, one or several; None for every layer.

    >>> patterns("layers.1.*")
    ('layers.1.*',)
    """
    if layers is None:
        return None
    if isinstance(layers, str):
        return (layers,)
    named = tuple(layers) if isinstance(layers, Iterable) else (None,)
    if not all(isinstance(name, str) for name in named):
        raise RegardError(
            "layers= names modules by their paths",
            got=repr(layers),
            accepted="a path or a list of them, with * for any part: 'layers.1.*'",
        )
    return named


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
    function of (path, module) that gives `Projections` where the usual names do not; if it gives
    None, they are found by name.
    """

    threshold: float = 100.0
    layers: str | Sequence[str] | None = None
    projections: Find | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if not number or not 0 < self.threshold < float("inf"):
            raise RegardError(
                "QK-clip has a threshold for logits",
                got=repr(self.threshold),
                accepted="a number above 0, often 100",
            )
        object.__setattr__(self, "layers", patterns(self.layers))
        if self.projections is not None and not callable(self.projections):
            raise RegardError(
                "projections= finds the projections of a module",
                got=repr(self.projections),
                accepted="a function of (path, module) that gives Projections(q=[...], k=[...])",
            )

    def wants(self, path: str) -> bool:
        return self.layers is None or any(fnmatch(path, name) for name in self.layers)

    def refuse(self, path: str, module: nn.Module) -> None:
        """Refuse what can be known before a module runs to be nothing to clip."""
        if self.projections is not None or not self.wants(path) or _untrained(path, module):
            return
        if not attends_by_name(module):
            return
        found = whole(module)
        if found is None:
            return
        frozen = Frozen.of(module, found)
        if _leaves_alone(path, frozen):
            return
        refuse_norms(path, module)
        _sides(path, module, frozen, shared=False)

    def clip(
        self, path: str, module: nn.Module, kind: Kind, max_logit: Float[Tensor, "h"]
    ) -> Float[Tensor, "h"] | None:
        """Scale what passed the threshold. Gives 1 for heads that were scaled, 0 for others; None
        for a module whose projections are all frozen, which is left alone."""
        found = self.found(path, module, kind)
        return None if found is None else self.scale(path, module, kind, found, max_logit)

    def scale(
        self,
        path: str,
        module: nn.Module,
        kind: Kind,
        found: Projections,
        max_logit: Float[Tensor, "h"],
    ) -> Float[Tensor, "h"]:
        """As `clip`, by the projections that were found."""
        frozen = Frozen.of(module, found)
        key_heads = len(found.k[0])
        sides = _sides(path, module, frozen, shared=key_heads < kind.heads or bool(found.alone))
        both = memory(found.q) & memory(found.k)
        if both and (sides != "both" or key_heads < kind.heads):
            raise RegardError(
                "QK-clip cannot scale weights that queries and keys share, and one side alone",
                got=f"{named(path, module)}, of which a part is frozen or has fewer heads",
                do="leave the layer out: QKClip(layers=...)",
            )
        share = torch.where(max_logit > self.threshold, self.threshold / max_logit, 1.0)
        if sides == "both":
            keys = share.unflatten(0, (key_heads, -1)).amax(1).sqrt()
            own = [view for view in found.q if not memory([view]) & both]
            scale_(found.k, keys)
            scale_(own, share / keys.repeat_interleave(kind.heads // key_heads))
            scale_(found.alone, share)
        else:
            scale_([*found.q, *found.alone] if sides == "q" else found.k, share)
        settle(found.all)
        return (share < 1).to(max_logit.dtype)

    def found(self, path: str, module: nn.Module, kind: Kind) -> Projections | None:
        """The projections of a module; None if they are all frozen."""
        if _untrained(path, module):
            return None
        if kind.trouble:
            raise RegardError(
                "QK-clip cannot hold the logits of this module",
                got=f"{named(path, module)}: {kind.trouble}",
                accepted="logits that are scaled products of queries and keys",
                do="leave it out: QKClip(layers=...)",
            )
        found = None if self.projections is None else self.projections(path, module)
        if found is None:
            found = projections(path, module, kind.heads, kind.width)
        else:
            check(path, module, found, kind.heads)
        return None if _leaves_alone(path, Frozen.of(module, found)) else found


class Layer(NamedTuple):
    """A module that ran, and what its heads reached."""

    module: nn.Module
    kind: Kind
    max_logit: Float[Tensor, "h"]


def clip_layers(
    clip: QKClip,
    layers: Mapping[str, Layer],
    during: Callable[[], AbstractContextManager[None]],
) -> dict[str, Tensor | None]:
    """What `clip` gives of each layer that could be clipped; each runs in `during()`."""
    clipped: dict[str, Tensor | None] = {}
    found: dict[str, Projections] = {}
    for path, layer in layers.items():
        with during():
            projections = clip.found(path, layer.module, layer.kind)
            if projections is None:
                clipped[path] = None
            else:
                found[path] = projections
    weights = {path: memory(trained(layers[path].module, each)) for path, each in found.items()}
    groups = together(weights)
    in_part = shared_in_part({path: weights[path] for path, *_ in groups})
    for path, *others in groups:
        module, kind, most = layers[path]
        with during():
            if path in in_part:
                refuse_shared(path, in_part[path])
            for other in others:
                most = torch.fmax(most, layers[other].max_logit.to(most.device))
            scaled = clip.scale(path, module, kind, found[path], most)
            clipped |= dict.fromkeys([path, *others], scaled)
    return clipped


def _untrained(path: str, module: nn.Module) -> bool:
    """Whether a module has parameters, and none of them is trained."""
    trained = [p.requires_grad for p in module.parameters()]
    return bool(trained) and not any(trained) and not _is_base(path)


def _leaves_alone(path: str, frozen: Frozen) -> bool:
    return frozen.everything and not _is_base(path)


def _is_base(path: str) -> bool:
    """Whether a module stands inside of one that adapts it, as PEFT has it: its weights do not
    train, and its logits change all the same."""
    return path.rpartition(".")[2] == "base_layer"


def _sides(path: str, module: nn.Module, frozen: Frozen, shared: bool) -> Literal["both", "q", "k"]:
    """What is trained whole, so that it can be scaled."""
    if not frozen.q:
        return "q" if frozen.k else "both"
    if not frozen.k and not shared:
        return "k"
    names = list(dict.fromkeys(frozen.q + frozen.k))
    raise RegardError(
        "QK-clip would have to change what is frozen",
        got=f"{named(path, module)} with {', '.join(names)} frozen"
        + (", and keys that several query heads share" if not frozen.k else ""),
        accepted="queries, or keys that no heads share, whose weights and biases are all trained "
        "(requires_grad): what an adapter adds to a frozen weight cannot scale the sum",
        do="train them whole; or adapt them by DoRA, whose magnitudes can be scaled; or leave the "
        "layer out: QKClip(layers=...), where rules still report large logits",
    )


def _only_hides(bias: object) -> bool:
    """Whether a bias is a float mask: 0 where a pair may be seen, hugely negative where not. Looked
    at once for a module, since it waits for the device."""
    return isinstance(bias, Dense) and bool(((bias.tensor == 0) | (bias.tensor <= -1e4)).all())
