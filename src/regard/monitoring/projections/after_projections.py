"""What a module does to queries and keys between their projections and the logits."""

from __future__ import annotations

from torch import nn


def norms_of(module: nn.Module) -> list[str]:
    """The norms of queries and keys; those of the input or output of the module are none."""
    norms = [n for n, part in module.named_children() if "norm" in type(part).__name__.lower()]
    found = [n for n in norms if n.lower().split("_")[0] in ("q", "k", "qk", "query", "key")]
    # norm_q beside norm_kv is a norm of what is read; beside norm_k, of what was made of it.
    pairs = (("norm_q", "norm_k"), ("norm_query", "norm_key"))
    return found + [n for pair in pairs if {*pair} <= {*norms} for n in pair]


def clamp_of(module: nn.Module) -> float | None:
    """The largest number that queries and keys are let through with, if there is one."""
    for whole in (module, getattr(module, "config", None)):
        limit = getattr(whole, "clip_qkv", None)
        if isinstance(limit, int | float) and limit:
            return float(limit)
    return None
