"""Projection weights as PyTorch and Hugging Face models store them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from regard.arguments import described, is_number
from regard.errors import RegardError
from regard.nn.multihead import MultiHeadAttention

Layout = Literal["side by side", "head by head"]
"""All queries, then all keys, then all values; or those of the first head, then of the next."""

NAMES = {
    "q_proj": ("q_proj", "query", "self.query", "attention.query"),
    "k_proj": ("k_proj", "key", "self.key", "attention.key"),
    "v_proj": ("v_proj", "value", "self.value", "attention.value"),
    "out_proj": ("out_proj", "o_proj", "dense", "output.dense"),
    "q_norm": ("q_norm",),
    "k_norm": ("k_norm",),
}
"""What others call the parts of MultiHeadAttention, when each is stored apart."""

NOT_ATTENTION = ("bias", "masked_bias", "rotary_emb.inv_freq")
"""What others store beside them: masks, tables of angles."""
NORM = "output.LayerNorm."
"""How the names begin of the norm that follows, which BERT stores with them."""


def load_weights(
    attention: MultiHeadAttention,
    state: Mapping[str, Tensor],
    prefix: str = "",
    *,
    layout: Layout | None = None,
    norm_offset: float = 0.0,
) -> None:
    """Copy the weights that stand in a state dict under `prefix` into an attention module.

    Read are the layouts of `nn.MultiheadAttention`; of Hugging Face models with q_proj, k_proj,
    v_proj and o_proj, out_proj or dense; of BERT and ViT (query, key, value, output.dense); and of
    GPT-2 (c_attn, c_proj, transposed or not). A bias that the source lacks is 0. Whatever has no
    place in the module is refused, so that nothing is lost on the way.

    A c_attn of `nn.Linear` has queries, keys and values side by side in nanoGPT, and head by head
    in GPTBigCode without multi_query, under the same names and shapes: `layout` says which. Norms
    of Gemma multiply by 1 + weight, where others multiply by the weight: `norm_offset=1` adds 1.

    >>> import torch
    >>> from regard import nn
    >>> names = ("q_proj", "k_proj", "v_proj", "o_proj")
    >>> llama = {f"layers.0.self_attn.{name}.weight": torch.randn(64, 64) for name in names}
    >>> attention = nn.MultiHeadAttention(64, 8, rotary=nn.Rotary())
    >>> nn.load_weights(attention, llama, "layers.0.self_attn.")
    >>> bool((attention.out_proj.weight == llama["layers.0.self_attn.o_proj.weight"]).all())
    True
    """
    if not isinstance(attention, MultiHeadAttention):
        raise RegardError(
            "weights are loaded into an attention module",
            got=described(attention),
            accepted="regard.nn.MultiHeadAttention",
        )
    if not isinstance(state, Mapping) or not isinstance(prefix, str):
        raise RegardError(
            "weights are those of a state dict, under a prefix",
            got=f"{type(state).__name__}, {described(prefix)}",
            accepted="names and tensors, as module.state_dict() gives them, and a text",
        )
    if layout not in (None, "side by side", "head by head"):
        raise RegardError(
            "layout= is the order of queries, keys and values in one projection",
            got=described(layout),
            accepted='"side by side" or "head by head"',
        )
    if not is_number(norm_offset):
        raise RegardError(
            "norm_offset= is added to the weights of q_norm and k_norm",
            got=described(norm_offset),
            accepted="a number: 1 for Gemma, else 0",
        )
    found = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
    weights = renamed(attention, found, layout)
    for name in {"q_norm.weight", "k_norm.weight"} & weights.keys():
        weights[name] = weights[name] + norm_offset if norm_offset else weights[name]
    own = dict(attention.named_parameters())
    unplaced = sorted(weights.keys() - own.keys())
    missing = sorted(name for name in own.keys() - weights.keys() if not name.endswith(".bias"))
    if unplaced or missing:
        raise RegardError(
            "these weights are not those of this module",
            got=f"no place for {unplaced}; nothing for {missing}",
            accepted="one tensor for each parameter; biases may be missing",
            do="set bias=, qk_norm= and the prefix as the source has them",
        )
    for name, weight in weights.items():
        if weight.shape != own[name].shape:
            raise RegardError(
                f"{name} has another shape in the source",
                got=str(list(weight.shape)),
                accepted=str(list(own[name].shape)),
                do="set heads, kv_heads=, head_width=, key_width= and value_width= as the source",
            )
    with torch.no_grad():
        for name, parameter in own.items():
            if name in weights:
                parameter.copy_(weights[name])
            else:
                parameter.zero_()


def from_torch(source: nn.MultiheadAttention) -> MultiHeadAttention:
    """An attention module with the weights, dropout, device and type of PyTorch's own.

    >>> import torch
    >>> theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    >>> x = torch.randn(2, 5, 16)
    >>> torch.allclose(from_torch(theirs)(x), theirs(x, x, x)[0], atol=1e-6)
    True
    """
    if not isinstance(source, nn.MultiheadAttention):
        raise RegardError(
            "from_torch: weights come from PyTorch's own attention",
            got=described(source),
            accepted="torch.nn.MultiheadAttention",
        )
    if source.bias_k is not None or source.add_zero_attn:
        raise RegardError(
            "from_torch: keys that PyTorch appends by itself have no place here",
            got=f"add_bias_kv={source.bias_k is not None}, add_zero_attn={source.add_zero_attn}",
            accepted="both False",
        )
    made = MultiHeadAttention(
        source.embed_dim,
        source.num_heads,
        key_width=source.kdim,
        value_width=source.vdim,
        bias=source.in_proj_bias is not None,
        dropout=source.dropout,
    )
    like = source.out_proj.weight
    made.to(device=like.device, dtype=like.dtype)
    load_weights(made, source.state_dict())
    # What is frozen stays so, part by part.
    learns = {name: p.requires_grad for name, p in source.named_parameters()}
    for name, parameter in made.named_parameters():
        part, kind = name.split(".")
        of = (name, f"{part}_{kind}", f"in_proj_{kind}")
        parameter.requires_grad_(next(learns[one] for one in of if one in learns))
    return made.train(source.training)


def renamed(
    attention: MultiHeadAttention, found: Mapping[str, Tensor], layout: Layout | None = None
) -> dict[str, Tensor]:
    """Weights under the names of `MultiHeadAttention`; names that are not known stay.

    >>> import torch
    >>> attention = MultiHeadAttention(4, 2, kv_heads=1)
    >>> sorted(renamed(attention, {"c_attn.weight": torch.ones(4, 8)}))
    ['k_proj.weight', 'q_proj.weight', 'v_proj.weight']
    """
    beside = {name for name in found if name in NOT_ATTENTION or name.startswith(NORM)}
    left = {name: t for name, t in found.items() if name not in beside}
    sizes = [p.out_features for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    weights: dict[str, Tensor] = {}
    by_head = False

    def place(name: str, tensor: Tensor) -> None:
        if name in weights:
            raise RegardError(
                f"{name} is in the source more than once, under two names",
                got=str(sorted(found)),
                accepted="one tensor for each parameter",
            )
        weights[name] = tensor

    def place_fused(kind: str, tensor: Tensor) -> None:
        if tensor.shape[0] != sum(sizes):
            raise RegardError(
                "fused projections do not split into this module's heads",
                got=f"{tensor.shape[0]} rows",
                accepted=f"{sum(sizes)}: {sizes} for queries, keys and values",
                do="set heads, kv_heads= and head_width= as the source has them",
            )
        if by_head:
            tensor = tensor.unflatten(0, (attention.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        start = 0
        for name, size in zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True):
            place(f"{name}.{kind}", tensor[start : start + size])
            start += size

    for kind in ("weight", "bias"):
        if f"in_proj_{kind}" in left:
            place_fused(kind, left.pop(f"in_proj_{kind}"))
    for name in ("q_proj", "k_proj", "v_proj"):
        if f"{name}_weight" in left:
            place(f"{name}.weight", left.pop(f"{name}_weight"))
    if "c_attn.weight" in left:
        fused = left.pop("c_attn.weight")
        # GPT-2 stores its matrices [in, out]; later relatives use nn.Linear, which is [out, in].
        transposed = tuple(fused.shape) == (attention.d_model, sum(sizes))
        by_head = _by_head(attention, transposed, layout)
        place_fused("weight", fused.mT if transposed else fused)
        if "c_attn.bias" in left:
            place_fused("bias", left.pop("c_attn.bias"))
        if "c_proj.weight" in left:
            out = left.pop("c_proj.weight")
            place("out_proj.weight", out.mT if transposed else out)
        if "c_proj.bias" in left:
            place("out_proj.bias", left.pop("c_proj.bias"))
    for ours, theirs in NAMES.items():
        for name in theirs:
            for kind in ("weight", "bias"):
                if f"{name}.{kind}" in left:
                    place(f"{ours}.{kind}", left.pop(f"{name}.{kind}"))
    return weights | left


def _by_head(attention: MultiHeadAttention, transposed: bool, layout: Layout | None) -> bool:
    """Whether a c_attn is ordered head by head. One head has one order; GPT-2 and models with fewer
    key heads than heads have all queries first."""
    own_keys = attention.kv_heads == attention.heads
    if layout == "head by head" and not own_keys:
        raise RegardError(
            "head by head there is a key head for each head",
            got=f"{attention.heads} heads, {attention.kv_heads} key heads",
        )
    if layout is None and own_keys and attention.heads > 1 and not transposed:
        raise RegardError(
            "a c_attn of nn.Linear has one of two orders, and its shape does not tell which",
            got=f"c_attn.weight with a key head for each of {attention.heads} heads",
            accepted='layout="side by side" (nanoGPT, Qwen) or "head by head" (GPTBigCode without '
            "multi_query)",
        )
    return layout == "head by head"
