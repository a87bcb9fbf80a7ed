"""Kernels ready before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from regard.arguments import device_of, refuse_no_module
from regard.backends.triton import INSTALLED
from regard.calls.dispatch import trace
from regard.errors import RegardError
from regard.inputs import DTYPES
from regard.masks.algebra import Mask
from regard.masks.causal import causal
from regard.values import whole

_WIDTHS = ("head_dim", "head_width", "d_kv", "head_size")
_PARTS = (("hidden_size", "num_attention_heads"), ("n_embd", "n_head"), ("d_model", "num_heads"))


def warm_up(
    model: nn.Module | None = None,
    *,
    width: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    masks: Sequence[Mask | None] = (None, causal()),
    gradients: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Load or compile now what calls will need later, so that none of them waits for it.

    What is compiled depends on the width of heads, their type and the kind of masks, but not on
    lengths, batch, heads or windows. Of a `model` the width, type and device are found; arguments
    override them. Returns how many kernels were compiled: the commonest may come compiled. On a CPU
    the loop in C is built and loaded, if it is not yet. `progress(done, total)` is called with how
    many kernels are compiled, or on a CPU how many masks were tried.

    >>> import regard, torch
    >>> regard.warm_up(width=64, dtype=torch.float32, device="cpu")
    0
    """
    if model is not None:
        refuse_no_module("what is warmed up", model)
        width = _width_of(model) if width is None else width
        parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
        if parameter is not None:
            dtype, device = dtype or parameter.dtype, device or parameter.device
    if width is None:
        raise RegardError(
            "warm_up needs the head dimension",
            got="no model, and no width=",
            do="regard.warm_up(model), or regard.warm_up(width=128)",
        )
    if whole("width", width) < 1:
        raise RegardError("width is that of a head", got=str(width), accepted="1 or more")
    where = device_of(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
    if kind not in DTYPES:
        names = ", ".join(str(t).removeprefix("torch.") for t in DTYPES)
        raise RegardError("heads have one floating-point type", got=str(kind), accepted=names)
    if where.type == "cuda" and INSTALLED:
        from regard.backends.triton.prepared.warming import warm_up as ready

        return ready(width, kind, where, masks, gradients=gradients, progress=progress)
    for done, mask in enumerate(masks, 1):
        q, k, v = (torch.zeros(1, 1, 64, width, dtype=kind, device=where) for _ in range(3))
        found = trace(q.requires_grad_(gradients), k, v, mask=mask)
        if gradients:
            found.out.sum().backward()
        if progress is not None:
            progress(done, len(masks))
    return 0


def _width_of(model: nn.Module) -> int:
    """Of a model's heads, as its configuration says, or one of its modules."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    for held in (config, *model.modules()):
        for name in _WIDTHS:
            if isinstance(found := getattr(held, name, None), int):
                return found
        for wide, heads in _PARTS:
            size, many = getattr(held, wide, None), getattr(held, heads, None)
            if isinstance(size, int) and isinstance(many, int) and many > 0:
                return size // many
    raise RegardError(
        "the head dimension of this model was not found",
        got=type(model).__name__,
        do="say it: regard.warm_up(model, width=64)",
    )
