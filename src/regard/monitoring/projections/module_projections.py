"""Where the projections of queries and keys are in a module that somebody else wrote, and which of
them may be changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.monitoring.projections import adapters
from regard.monitoring.projections.after_projections import clamp_of, norms_of
from regard.monitoring.projections.fused_layouts import (
    CROSS,
    HEAD_BY_HEAD,
    SIDE_BY_SIDE,
    layout_of,
)
from regard.monitoring.projections.sharded_weights import is_sharded, rows_of, stood_for


class Projections(NamedTuple):
    """Views of the weights and biases that make queries and keys, one row of each per head.

    Multiplying row h of all of `q` by a number does the same to the queries of head h; `k` has as
    many rows as there are key heads. `alone` are parts of queries whose keys are in no view, as all
    heads share them whole: the rotated part of multi-head latent attention. They are
    scaled by the product of both factors."""

    q: list[Tensor]
    k: list[Tensor]
    alone: Sequence[Tensor] = ()

    @property
    def all(self) -> list[Tensor]:
        return [*self.q, *self.k, *self.alone]


Find = Callable[[str, nn.Module], Projections | None]
"""From the path of a module and the module: its projections, or None to look for them by name."""

_PAIRS = (
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("q", "k"),
    ("q_lin", "k_lin"),
    ("to_q", "to_k"),
    ("wq", "wk"),
    ("query_proj", "key_proj"),
)
_FUSED = (*SIDE_BY_SIDE, "in_proj", *HEAD_BY_HEAD)
"""One projection that gives queries, keys and values."""
_LATENT = (
    ("q_b_proj", "kv_b_proj"),
    ("q_proj", "kv_b_proj"),
    ("wq_b", "wkv_b"),
    ("wq", "wkv_b"),
)
"""Multi-head latent attention (DeepSeek, Kimi): one projection gives the part of each query head
that is not rotated, then the part that is; the other of each head the keys that are not rotated,
then the values. The rotated part of the keys is one for all heads."""
_OF_MULTIHEAD = {
    "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k",
    "bias_v",
}  # fmt: skip


def projections(path: str, module: nn.Module, heads: int, width: int) -> Projections:
    """The projections of a module with so many query heads of a width, by the names in use."""
    refuse_norms(path, module)
    found = _found(module, heads, width)
    if found is None:
        raise RegardError(
            "QK-clip does not know where this module projects its queries and keys",
            got=f"{named(path, module)} with {_parts(module)}",
            accepted="nn.MultiheadAttention, or projections named "
            + ", ".join("/".join(pair) for pair in _PAIRS)
            + ", "
            + ", ".join(_FUSED)
            + "; of multi-head latent attention "
            + ", ".join("/".join(pair) for pair in _LATENT),
            do="say where they are: QKClip(projections=lambda path, module: Projections(...))",
        )
    check(path, module, found, heads)
    return found


def refuse_norms(path: str, module: nn.Module) -> None:
    """Weights that are normalised away cannot be clipped. Norms of latents come before."""
    if _latent(module) is not None:
        return
    norms, clamp = norms_of(module), clamp_of(module)
    if clamp is not None:
        raise RegardError(
            "QK-clip cannot hold logits whose queries and keys are clamped after their projections",
            got=f"{named(path, module)} with clip_qkv={clamp:g}",
            accepted="logits that are proportional to the projections",
            do="leave qk_clip= out: clamped logits are bounded; or leave this layer out with "
            "QKClip(layers=...)",
        )
    if norms:
        raise RegardError(
            "QK-clip would do nothing: queries and keys are normalised after their projections",
            got=f"{named(path, module)} with {', '.join(norms)}",
            accepted="projections that reach the logits",
            do="leave qk_clip= out: normalised logits are bounded by the weights of the norms; or "
            "leave this layer out with QKClip(layers=...)",
        )


def whole(module: nn.Module) -> Projections | None:
    """The projections of a module by the names in use, not cut into heads; None if it has none."""
    if isinstance(module, nn.MultiheadAttention):
        return _of_multihead(module)
    latent = _latent(module)
    if latent is not None:
        q_name, k_name = latent
        return Projections(
            _outputs(getattr(module, q_name), q_name), _outputs(getattr(module, k_name), k_name)
        )
    for q_name, k_name in _PAIRS:
        q, k = getattr(module, q_name, None), getattr(module, k_name, None)
        if _is_projection(q) and _is_projection(k):
            return Projections(_outputs(q, q_name), _outputs(k, k_name))
    if _crosses(module):
        q, both = (_outputs(getattr(module, name), name) for name in CROSS)
        return Projections(q, [t[: len(t) // 2] for t in both])
    name = _fused(module)
    if name is None:
        return None
    both = _outputs(getattr(module, name), name)
    return Projections(both, both)


def attends_by_name(module: nn.Module) -> bool:
    """Whether the names of its projections may say that a module attends before it has run:
    state-space models have an `in_proj`, too."""
    return _fused(module) != "in_proj"


class Frozen(NamedTuple):
    """Which of the tensors that make queries and keys must not be changed, by name."""

    q: list[str]
    k: list[str]
    everything: bool
    """Whether there is nothing among them that may be changed."""

    @staticmethod
    def of(module: nn.Module, found: Projections) -> Frozen:
        q, k = _learned(module, [*found.q, *found.alone]), _learned(module, found.k)
        return Frozen(
            [name for name, trains in q if not trains],
            [name for name, trains in k if not trains],
            everything=not any(trains for _, trains in q + k),
        )


def trained(module: nn.Module, found: Projections) -> list[Tensor]:
    """Those of all views that may be changed."""
    each = zip(found.all, _learned(module, found.all), strict=True)
    return [view for view, (_, trains) in each if trains]


def _learned(module: nn.Module, views: Sequence[Tensor]) -> list[tuple[str, bool]]:
    """What each view is of, by name, and whether that is trained."""
    known = {_memory(p): (name, p.requires_grad) for name, p in module.named_parameters()}
    return [known.get(_memory(t), ("a tensor", _of_leaf(t))) for t in views]


def _memory(t: Tensor) -> int:
    """Where the numbers of a tensor are: the same for all views of it, `.data` too. What is sharded
    has no such place here, and is known by itself."""
    weight = t if is_sharded(t) else stood_for(t)
    if weight is not None:
        return id(weight)
    return t.untyped_storage().data_ptr()


def _of_leaf(view: Tensor) -> bool:
    """A view that is made without gradients does not say that its tensor wants them."""
    weight = stood_for(view)
    if weight is not None:
        return weight.requires_grad
    return bool((view._base if view._base is not None else view).requires_grad)


def check(path: str, module: nn.Module, found: Projections, heads: int) -> None:
    """Each view has a row per head, and key heads are shared evenly."""
    if not isinstance(found, Projections) or not found.q or not found.k:
        raise RegardError(
            "projections= did not find the projections of a module",
            got=f"{type(found).__name__} for {named(path, module)}",
            accepted="Projections(q=[...], k=[...]) with views of weights, or None to find them "
            "by their names",
        )
    if any(is_sharded(t) for t in found.all):
        raise RegardError(
            "projections= gave views of weights that are sharded over ranks",
            got=named(path, module),
            accepted="projections that regard finds by their names: a view may hold a copy there, "
            "and scaling it would do nothing",
            do="name the projections as others do, or leave the layer out: QKClip(layers=...)",
        )
    rows = [len(t) for t in (*found.q, *found.alone)], [len(t) for t in found.k]
    fits = set(rows[0]) == {heads} and len(set(rows[1])) == 1
    if not fits or not rows[1][0] or heads % rows[1][0]:
        raise RegardError(
            "projections do not fit the heads that were seen",
            got=f"{named(path, module)}: q with {rows[0]} rows, k with {rows[1]}",
            accepted=f"q with {heads} rows, one per head; k with a number that divides it",
        )


def _found(module: nn.Module, heads: int, width: int) -> Projections | None:
    found = whole(module)
    if found is None:
        return None
    if isinstance(module, nn.MultiheadAttention):
        width = module.head_dim
    elif _latent(module) is not None:
        return _cut_latent(module, found, heads, width)
    found = _cut(module, found, heads, width)
    return None if found is None else _with_biases(module, found, width)


def _cut(module: nn.Module, found: Projections, heads: int, width: int) -> Projections | None:
    """Views of each head, of what is known by names to be in some order."""
    if found.q is not found.k:
        fits = all(out.shape[0] % width == 0 for out in (*found.q, *found.k))
        return Projections(_by_head(found.q, width), _by_head(found.k, width)) if fits else None
    match layout_of(module, _fused(module) or ""):
        case "side by side":
            return _cut_side_by_side(found.q, heads, width)
        case "head by head":
            return _cut_head_by_head(found.q, heads, width)
    # The heads of four parts are no rows of one view.
    return None


def _with_biases(module: nn.Module, found: Projections, width: int) -> Projections | None:
    """With the biases that some modules hold beside their projections (DeBERTa, EVA)."""
    sides = []
    for views, name in ((found.q, "q_bias"), (found.k, "k_bias")):
        bias = getattr(module, name, None)
        own = [rows_of(bias)] if isinstance(bias, nn.Parameter) else []
        if any(t.shape != (len(views[0]) * width,) for t in own):
            return None
        sides.append([*views, *_by_head(own, width)])
    return Projections(*sides)


def query_weight(module: nn.Module) -> tuple[Any, int]:
    """The weight that queries are projected by, if names tell, and its axis of outputs."""
    pairs = (*_LATENT, *_PAIRS, *((CROSS,) if _crosses(module) else ()))
    names = [*(pair[0] for pair in pairs), *_FUSED]
    parts = (getattr(module, name, None) for name in names)
    part: Any = next((part for part in parts if _is_projection(part)), None)
    if part is None:
        return getattr(module, "in_proj_weight", None), 0
    return part.weight, 1 if _outputs_last(part) else 0


def _latent(module: nn.Module) -> tuple[str, str] | None:
    """The names of the projections of multi-head latent attention, if it is one."""
    for names in _LATENT:
        if all(_is_projection(getattr(module, name, None)) for name in names):
            return names
    return None


def _cut_latent(
    module: nn.Module, found: Projections, heads: int, width: int
) -> Projections | None:
    still = getattr(module, "qk_nope_head_dim", None)
    if not isinstance(still, int) or any(t.shape[0] != heads * width for t in found.q):
        return None
    if any(t.shape[0] % heads or t.shape[0] // heads < still for t in found.k):
        return None
    q = _by_head(found.q, width)
    k = [t.unflatten(0, (heads, -1)) for t in found.k]
    return Projections(
        [t[:, :still] for t in q], [t[:, :still] for t in k], [t[:, still:] for t in q]
    )


def _fused(module: nn.Module) -> str | None:
    """The name of the one projection that gives queries, keys and values."""
    return next((name for name in _FUSED if _is_projection(getattr(module, name, None))), None)


def _crosses(module: nn.Module) -> bool:
    """Whether a module projects queries apart from keys and values."""
    return all(_is_projection(getattr(module, name, None)) for name in CROSS)


def _of_multihead(module: nn.MultiheadAttention) -> Projections:
    own = {name for name, _ in module.named_parameters() if not name.startswith("out_proj.")}
    _refuse_more(own - _OF_MULTIHEAD, type(module).__name__)
    D = module.embed_dim
    if module.in_proj_weight is not None:
        weight = rows_of(module.in_proj_weight)
        q, k = [weight[:D]], [weight[D : 2 * D]]
    else:
        q, k = [rows_of(module.q_proj_weight)], [rows_of(module.k_proj_weight)]
    if module.in_proj_bias is not None:
        bias = rows_of(module.in_proj_bias)
        q.append(bias[:D])
        k.append(bias[D : 2 * D])
    if module.bias_k is not None:
        if is_sharded(module.bias_k):
            k.append(rows_of(module.bias_k, last=True))
        else:
            k.append(module.bias_k.flatten())
    return Projections(q, k)


def _refuse_more(names: set[str], whose: str) -> None:
    """What has other parameters makes its weight of them, or adds something to its product."""
    if names:
        raise RegardError(
            "QK-clip does not know how this projection uses its parameters",
            got=f"{whose} with {', '.join(sorted(names))}",
            accepted="projections with a weight and a bias, and LoRA of PEFT around them",
            do="say what is to be scaled: QKClip(projections=lambda path, module: "
            "Projections(...)), or leave the layer out: QKClip(layers=...)",
        )


def _cut_side_by_side(outs: list[Tensor], heads: int, width: int) -> Projections | None:
    rest = outs[0].shape[0] - heads * width
    if rest <= 0 or rest % (2 * width):
        return None
    middle = heads * width + rest // 2
    return Projections(
        _by_head([out[: heads * width] for out in outs], width),
        _by_head([out[heads * width : middle] for out in outs], width),
    )


def _cut_head_by_head(outs: list[Tensor], heads: int, width: int) -> Projections | None:
    if outs[0].shape[0] != heads * 3 * width:
        return None
    each = [out.unflatten(0, (heads, 3, width)) for out in outs]
    return Projections([out[:, 0] for out in each], [out[:, 1] for out in each])


def _by_head(outs: list[Tensor], width: int) -> list[Tensor]:
    return [out.unflatten(0, (-1, width)) for out in outs]


def _is_projection(part: Any) -> bool:
    return isinstance(getattr(part, "weight", None), Tensor) and part.weight.ndim == 2


def _outputs(projection: Any, name: str) -> list[Tensor]:
    """Everything that the output of a projection is proportional to, with the axis of outputs
    first."""
    if adapters.is_adapted(projection):
        weighs, added = adapters.parts(projection)
        inside = _outputs(projection.base_layer, f"{name}.base_layer")
        return [*(inside if weighs else inside[1:]), *map(rows_of, added)]
    own = {part for part, _ in projection.named_parameters()}
    _refuse_more(own - {"weight", "bias"}, f"{type(projection).__name__} {name!r}")
    weight = rows_of(projection.weight, last=_outputs_last(projection))
    bias = getattr(projection, "bias", None)
    return [weight, *([] if bias is None else [rows_of(bias)])]


def _outputs_last(projection: Any) -> bool:
    """Conv1D of transformers has the axis of outputs last."""
    return type(projection).__name__ == "Conv1D"


def named(path: str, module: nn.Module) -> str:
    return f"{type(module).__name__} at {path!r}"


def _parts(module: nn.Module) -> str:
    own: Iterator[str] = (name for name, _ in module.named_children())
    return ", ".join(own) or "no parts"


def scale_(views: Sequence[Tensor], by: Tensor) -> None:
    """Multiply the rows of views, head by head."""
    with torch.no_grad():
        for view in views:
            view.mul_(by.to(view.device, view.dtype).view(-1, *(1,) * (view.ndim - 1)))
