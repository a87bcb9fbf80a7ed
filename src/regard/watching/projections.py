"""Where the projections of queries and keys are in a module that somebody else wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import RegardError


class Projections(NamedTuple):
    """Views of the weights and biases that make queries and keys, one row of each per head.

    Multiplying row h of all of `q` by a number does the same to the queries of head h; `k` has as
    many rows as there are key heads."""

    q: list[Tensor]
    k: list[Tensor]


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
_SIDE_BY_SIDE = ("c_attn", "qkv_proj", "qkv", "Wqkv", "in_proj")
"""One projection that gives all queries, then all keys, then all values."""
_HEAD_BY_HEAD = ("query_key_value",)
"""One projection that gives query, key and value of the first head, then of the next."""


def projections(path: str, module: nn.Module, heads: int, width: int) -> Projections:
    """The projections of a module with so many query heads of a width, by the names in use."""
    norms = [name for name, part in module.named_children() if _normalises(name, part)]
    if norms:
        raise RegardError(
            "QK-clip would do nothing: queries and keys are normalised after their projections",
            got=f"{_named(path, module)} with {', '.join(norms)}",
            accepted="projections that reach the logits",
            do="leave qk_clip= out: normalised logits are bounded by the weights of the norms; or "
            "leave this layer out with QKClip(layers=...)",
        )
    found = _found(module, heads, width)
    if found is None:
        raise RegardError(
            "QK-clip does not know where this module projects its queries and keys",
            got=f"{_named(path, module)} with {_parts(module)}",
            accepted="nn.MultiheadAttention, or projections named "
            + ", ".join("/".join(pair) for pair in _PAIRS)
            + ", "
            + ", ".join((*_SIDE_BY_SIDE, *_HEAD_BY_HEAD)),
            do="say where they are: QKClip(projections=lambda path, module: Projections(...))",
        )
    check(path, module, found, heads)
    return found


def check(path: str, module: nn.Module, found: Projections, heads: int) -> None:
    """Each view has a row per head, and key heads are shared evenly."""
    rows = [len(t) for t in found.q], [len(t) for t in found.k]
    fits = set(rows[0]) == {heads} and len(set(rows[1])) == 1
    if not fits or not rows[1][0] or heads % rows[1][0]:
        raise RegardError(
            "projections do not fit the heads that were seen",
            got=f"{_named(path, module)}: q with {rows[0]} rows, k with {rows[1]}",
            accepted=f"q with {heads} rows, one per head; k with a number that divides it",
        )


def _found(module: nn.Module, heads: int, width: int) -> Projections | None:
    if isinstance(module, nn.MultiheadAttention):
        return _of_multihead(module, heads)
    for q_name, k_name in _PAIRS:
        q, k = getattr(module, q_name, None), getattr(module, k_name, None)
        if _is_projection(q) and _is_projection(k):
            q_out, k_out = _outputs(q), _outputs(k)
            whole = all(out.shape[0] % width == 0 for out in (*q_out, *k_out))
            return Projections(*(_by_head(out, width) for out in (q_out, k_out))) if whole else None
    for name in (*_SIDE_BY_SIDE, *_HEAD_BY_HEAD):
        fused = getattr(module, name, None)
        if _is_projection(fused):
            cut = _cut_head_by_head if name in _HEAD_BY_HEAD else _cut_side_by_side
            return cut(_outputs(fused), heads, width)
    return None


def _of_multihead(module: nn.MultiheadAttention, heads: int) -> Projections:
    width = module.embed_dim // heads
    if module.in_proj_weight is not None:
        q, k = (
            [module.in_proj_weight[: module.embed_dim]],
            [module.in_proj_weight[module.embed_dim : 2 * module.embed_dim]],
        )
    else:
        q, k = [module.q_proj_weight], [module.k_proj_weight]
    if module.in_proj_bias is not None:
        q.append(module.in_proj_bias[: module.embed_dim])
        k.append(module.in_proj_bias[module.embed_dim : 2 * module.embed_dim])
    if module.bias_k is not None:
        k.append(module.bias_k.flatten())
    return Projections(_by_head(q, width), _by_head(k, width))


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


def _outputs(projection: Any) -> list[Tensor]:
    """Weight and bias with the axis of outputs first. Conv1D of transformers has it last."""
    weight = projection.weight
    flipped = type(projection).__name__ == "Conv1D"
    bias = getattr(projection, "bias", None)
    return [weight.T if flipped else weight, *([] if bias is None else [bias])]


def _normalises(name: str, part: nn.Module) -> bool:
    """A norm of queries or keys; one of the input or output of the module is none."""
    about = name.lower().split("_")[0]
    return "norm" in type(part).__name__.lower() and about in ("q", "k", "qk", "query", "key")


def _named(path: str, module: nn.Module) -> str:
    return f"{type(module).__name__} at {path!r}"


def _parts(module: nn.Module) -> str:
    own: Iterator[str] = (name for name, _ in module.named_children())
    return ", ".join(own) or "no parts"


def scale_(views: list[Tensor], by: Tensor) -> None:
    """Multiply the rows of views, head by head."""
    with torch.no_grad():
        for view in views:
            view.mul_(by.to(view.dtype).view(-1, *(1,) * (view.ndim - 1)))
