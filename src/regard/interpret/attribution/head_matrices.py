"""The matrices of heads: by which they query, are found, read and write."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import RegardError
from regard.interpret.attribution.linear_maps import inside, linear_map, parts_of
from regard.interpret.attribution.output_projections import output_projection
from regard.monitoring.projections.fused_layouts import (
    CROSS,
    HEAD_BY_HEAD,
    SIDE_BY_SIDE,
    Layout,
    layout_of,
)

TRIPLES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
)
COUNTS = ("heads", "num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_COUNTS = ("kv_heads", "num_key_value_heads", "num_kv_heads")


class HeadMatrices(NamedTuple):
    """Of one layer: x @ q is a query, out @ o is written. Query heads share key heads evenly."""

    q: Float[Tensor, "h m d"]
    k: Float[Tensor, "g m d"]
    v: Float[Tensor, "g m e"]
    o: Float[Tensor, "h e m"]

    def head(self, h: int) -> HeadMatrices:
        """Those of one head, in float64."""
        g = h // (len(self.q) // len(self.k))
        return HeadMatrices(
            *(t[i : i + 1].double() for t, i in zip(self, (h, g, g, h), strict=True))
        )


def is_attention(module: nn.Module) -> bool:
    """Whether a module has projections that are known by name."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    names = (*SIDE_BY_SIDE, *HEAD_BY_HEAD)
    fused = any(_projects(inside(module, name)) for name in names)
    return fused or any(all(_projects(inside(module, n)) for n in names) for names in TRIPLES)


def head_matrices(model: nn.Module, path: str) -> HeadMatrices:
    """The matrices of a layer's heads, by the names in use. Rotary positions and norms of queries
    and keys are no part of them."""
    module = model.get_submodule(path)
    H = _count(module, COUNTS)
    G = H if H is None else _count(module, KEY_COUNTS) or H
    found = None if H is None or G is None else _found(module, H, G)
    if H is None or found is None:
        raise RegardError(
            "this layer's projections are not known by name",
            got=f"{type(module).__name__} at {path!r} with {parts_of(module)}",
            accepted="nn.MultiheadAttention, or projections named "
            + ", ".join("/".join(names) for names in TRIPLES)
            + ", "
            + ", ".join((*SIDE_BY_SIDE, *HEAD_BY_HEAD)),
            do="give the matrices: regard.interpret.attribution.HeadMatrices(q, k, v, o)",
        )
    q, k, v = (t.detach() for t in found)
    return HeadMatrices(q, k, v, output_projection(model, path, H, v.shape[-1]).weight)


def _found(module: nn.Module, H: int, G: int) -> tuple[Tensor, Tensor, Tensor] | None:
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is None:
            every = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        else:
            every = module.in_proj_weight.chunk(3)
        q, k, v = (t.T for t in every)
        return _by_head(q, H), _by_head(k, H), _by_head(v, H)
    for names in TRIPLES:
        if all(_projects(inside(module, name)) for name in names):
            q, k, v = (linear_map(inside(module, name)).weight for name in names)
            fits = q.shape[1] % H == 0 and k.shape[1] % G == 0 and v.shape[1] % G == 0
            return (_by_head(q, H), _by_head(k, G), _by_head(v, G)) if fits else None
    if all(_projects(inside(module, name)) for name in CROSS):
        q, both = (linear_map(inside(module, name)).weight for name in CROSS)
        k, v = both.chunk(2, 1)
        return _by_head(q, H), _by_head(k, H), _by_head(v, H)
    for name in (*SIDE_BY_SIDE, *HEAD_BY_HEAD):
        if _projects(inside(module, name)):
            return _cut(linear_map(inside(module, name)).weight, H, G, layout_of(module, name))
    return None


def _cut(every: Tensor, H: int, G: int, layout: Layout) -> tuple[Tensor, Tensor, Tensor] | None:
    if every.shape[1] % (H + 2 * G):
        return None
    d = every.shape[1] // (H + 2 * G)
    if layout == "in four parts":
        q, v, k = every.unflatten(1, (4, 3, H // 4, -1)).permute(2, 1, 3, 0, 4)
        return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    if layout == "head by head":
        if H != G:
            return None
        q, k, v = every.unflatten(1, (H, 3, d)).permute(2, 1, 0, 3)
        return q, k, v
    q, k, v = every.split([H * d, G * d, G * d], 1)
    return _by_head(q, H), _by_head(k, G), _by_head(v, G)


def _by_head(weight: Float[Tensor, "m hd"], heads: int) -> Float[Tensor, "h m d"]:
    each: Tensor = weight.unflatten(1, (heads, -1))
    return each.transpose(0, 1)


def _count(module: nn.Module, names: tuple[str, ...]) -> int | None:
    for whole in (module, getattr(module, "config", None)):
        for name in names:
            found = getattr(whole, name, None)
            if isinstance(found, int):
                return found
    return None


def _projects(part: Any) -> bool:
    weight = getattr(part, "weight", None)
    return isinstance(part, nn.Module) and isinstance(weight, Tensor) and weight.ndim == 2
