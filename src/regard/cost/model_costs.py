"""Costs of a call, a layer and a model, built from their parts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.biases.bias import Bias
from regard.cost.cache import cache_bytes, decoding
from regard.cost.call_memory import Memory, attention_parts, eager_memory, fused_memory
from regard.cost.configuration import Configuration
from regard.cost.costs import Cost
from regard.cost.devices import device as find_device
from regard.cost.parts import TILE, Part, linear
from regard.cost.presets import preset
from regard.cost.rates import Device
from regard.cost.units import tokens, width_of
from regard.errors import RegardError
from regard.inputs import AttentionInputs, check
from regard.masks.algebra import Mask
from regard.masks.causal import causal
from regard.masks.window import window as window_of
from regard.scores.score import Score
from regard.values import whole


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    bias: Bias | None = None,
    sink: Tensor | None = None,
    device: str | Device | None = None,
    tile: tuple[int, int] = TILE,
) -> Cost:
    """The cost of one call of attention, from the arguments that `regard.attention` takes.

    The tensors are not read: those of the device "meta", which hold nothing, do as well.

    >>> import torch
    >>> from regard import cost, masks
    >>> x = torch.empty(1, 2, 1024, 64, device="meta")
    >>> found = cost.call(x, x, x, mask=masks.causal())
    >>> found.flops("needed"), found.flops("executed"), found.flops("dense")
    (268697600, 301989888, 536870912)
    """
    x = check(
        q, k, v, mask=mask, score=score, bias=bias, softcap=None, sink=sink, scale=None,
        dropout=0.0, training=False,
    )  # fmt: skip
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    dtype = str(x.q.dtype).removeprefix("torch.")
    return Cost(
        name="attention",
        what=f"attention of {shapes}, {dtype}" + ("" if mask is None else f", mask={mask!r}"),
        tokens=x.shape.B * x.shape.Q,
        dtype=dtype,
        parts=attention_parts(x, _checked(tile)),
        eager=eager_memory(x),
        fused=fused_memory(x),
        tile=tile,
        device=None if device is None else find_device(device),
    )


def layer(
    width: int,
    heads: int,
    context: int | str,
    *,
    key_heads: int | None = None,
    head_width: int | None = None,
    batch: int = 1,
    mask: Mask | None = None,
    dtype: str = "float32",
    device: str | Device | None = None,
    tile: tuple[int, int] = TILE,
) -> Cost:
    """The cost of one attention layer: projections, scores, weighted sum, output.

    >>> from regard import cost
    >>> found = cost.layer(768, 12, 1024)
    >>> {part.name: part.macs.dense for part in found.parts}
    {'projections': 1811939328, 'scores': 805306368, 'weighted sum': 805306368, 'output': 603979776}
    """
    c = Configuration(
        "layer", width, heads, 1, key_heads=key_heads or 0, head_width=head_width or 0, dtype=dtype
    )
    n, batch = tokens(context), tokens(batch, "batch counts texts")
    parts, eager, fused = _attention_layer(c, _call(c, n, batch, mask), n * batch, _checked(tile))
    shown = "" if mask is None else f", mask={mask!r}"
    return Cost(
        name="attention layer",
        what=f"attention layer {width} wide, {_heads(c)}, {_texts(n, batch)}, {dtype}{shown}",
        tokens=n * batch,
        dtype=dtype,
        parts=parts,
        eager=eager,
        fused=fused,
        tile=tile,
        weights=c.attention_parameters * c.itemsize,
        device=None if device is None else find_device(device),
    )


def model(
    of: str | Configuration,
    context: int | str,
    *,
    batch: int = 1,
    mask: Mask | None = None,
    dtype: str | None = None,
    device: str | Device | None = None,
    tile: tuple[int, int] = TILE,
) -> Cost:
    """The cost of a whole model: a forward pass over a context (prefill), and decoding after it.

    `of` is the name of a well-known model or a `Configuration`. The mask is causal unless another
    is given; windows of the model's layers come on top of it.

    >>> from regard import cost
    >>> found = cost.model("llama-3-8b", "128k")
    >>> found.cache.per_token, found.cache.in_context
    (131072, 17179869184)
    """
    c = of if isinstance(of, Configuration) else preset(of)
    c = c if dtype is None else c.but(dtype=dtype)
    n, batch, tile = tokens(context), tokens(batch, "batch counts texts"), _checked(tile)
    mask = causal() if mask is None else mask
    total: dict[str, Part] = {}
    eager = fused = Memory(0, 0)
    for window, layers in c.layers_by_window().items():
        seen = mask if window is None else mask & window_of(window - 1)
        x = _call(c, n, batch, seen)
        parts, one_eager, one_fused = _attention_layer(c, x, n * batch, tile)
        for part in parts:
            whole = part.times(layers)
            total[part.name] = total[part.name].plus(whole) if part.name in total else whole
        eager, fused = _both(eager, one_eager.times(layers)), _both(fused, one_fused.times(layers))
    inner, kept = _feed_forward(c, n * batch)
    total[inner.name] = inner.times(c.layers)
    if c.experts > 1:
        router = linear("router", n * batch, c.width, c.experts, c.itemsize)
        total["router"] = router.times(c.layers)
    if c.vocabulary:
        total["vocabulary"] = linear("vocabulary", n * batch, c.width, c.vocabulary, c.itemsize)
    eager, fused = (_both(m, Memory(0, c.layers * kept)) for m in (eager, fused))
    notes = []
    if c.trained_context is not None and n > c.trained_context:
        notes.append(f"{c.name} was made for contexts up to {c.trained_context:,} tokens")
    if c.experts > 1:
        notes.append(f"each token goes through {c.active_experts} of {c.experts} feed-forwards")
    return Cost(
        name=c.name,
        what=f"{c.name}, {c.layers} layers, {_heads(c)}, {_texts(n, batch)}, {c.dtype}, "
        f"mask={mask!r}{_windows(c)}",
        tokens=n * batch,
        dtype=c.dtype,
        parts=tuple(total.values()),
        eager=eager,
        fused=fused,
        tile=tile,
        weights=c.parameters * c.itemsize,
        cache=cache_bytes(c, n, batch),
        decoding=decoding(c, n, batch),
        device=None if device is None else find_device(device),
        configuration=c,
        notes=tuple(notes),
    )


def _call(c: Configuration, n: int, batch: int, mask: Mask | None) -> AttentionInputs:
    """A call of the layer's attention, on tensors that hold nothing."""
    dtype = getattr(torch, c.dtype, None)
    if dtype is None or not dtype.is_floating_point or width_of(c.dtype) == 1:
        raise RegardError(
            "attention computes in floating point",
            got=c.dtype,
            accepted="float64, float32, bfloat16, float16",
        )
    q, k = (
        torch.empty(batch, heads, n, c.head_width, dtype=dtype, device="meta")
        for heads in (c.heads, c.key_heads)
    )
    return check(
        q, k, k, mask=mask, score=None, bias=None, softcap=None, sink=None, scale=None,
        dropout=0.0, training=False,
    )  # fmt: skip


def _attention_layer(
    c: Configuration, x: AttentionInputs, rows: int, tile: tuple[int, int]
) -> tuple[tuple[Part, ...], Memory, Memory]:
    heads, item = c.heads * c.head_width, c.itemsize
    taken = linear("projections", rows, c.width, heads + 2 * c.key_heads * c.head_width, item)
    given = linear("output", rows, heads, c.width, item)
    eager, fused = eager_memory(x), fused_memory(x)
    # Both keep what the projections took; the output's matrix takes what a fused kernel keeps
    # anyway, and a copy of what eager code mixed.
    source, mixed = rows * c.width * item, rows * heads * item
    return (
        (taken, *attention_parts(x, tile), given),
        Memory(eager.peak, eager.kept + source + mixed),
        Memory(fused.peak, fused.kept + source),
    )


def _feed_forward(c: Configuration, rows: int) -> tuple[Part, int]:
    """The feed-forward of one layer, and the bytes that it keeps: what it took, and each product
    and function of its inner width."""
    rows, item = rows * c.active_experts, c.itemsize
    name = "feed-forward"
    up = linear(name, rows, c.width, (2 if c.gated else 1) * c.feed_forward, item)
    down = linear(name, rows, c.feed_forward, c.width, item)
    kept = rows * item * (c.width + (4 if c.gated else 2) * c.feed_forward)
    others = (min(c.experts, rows) - 1) * c.expert_parameters * item
    part = up.plus(down)
    part = replace(
        part, fused_bytes=part.fused_bytes + others, eager_bytes=part.eager_bytes + others
    )
    return part, kept


def _both(a: Memory, b: Memory) -> Memory:
    return Memory(max(a.peak, b.peak), a.kept + b.kept)


def _checked(tile: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(tile, (tuple, list)) or len(tile) != 2 or min(map(_whole, tile)) < 1:
        raise RegardError("tile counts queries and keys", got=repr(tile), accepted="1 or more each")
    return tile


def _whole(side: int) -> int:
    return whole("tile: a side", side)


def _heads(c: Configuration) -> str:
    grouped = f", {c.key_heads} key heads" if c.key_heads != c.heads else ""
    return f"{c.heads} heads{grouped} {c.head_width} wide"


def _texts(n: int, batch: int) -> str:
    return f"{n:,} tokens" if batch == 1 else f"{batch} × {n:,} tokens"


def _windows(c: Configuration) -> str:
    some = {w: n for w, n in c.layers_by_window().items() if w is not None}
    shown = [
        f" & window({w - 1})" + (f" in {n} layers" if n < c.layers else "") for w, n in some.items()
    ]
    return "".join(shown)
