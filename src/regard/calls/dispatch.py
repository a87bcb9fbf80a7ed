"""The public functions: check the call, choose a backend once for its kind, run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Backend
from regard.between_graphs import between_graphs
from regard.biases.bias import Bias
from regard.calls.choice import BACKENDS, choose
from regard.calls.kinds import kind_of, kind_to_bind, kind_with_more, step_of
from regard.calls.peer_arguments import Unknown, refuse_arguments
from regard.calls.remembered import (
    found,
    found_to_bind,
    found_with_more,
    note,
    recent,
    remember,
    remember_to_bind,
)
from regard.calls.watchers import changed, show, unwatched, watched, watchers
from regard.inputs import AttentionInputs, check
from regard.jagged import JaggedInputs, JaggedTrace, any_nested, pack, pack_tokens
from regard.masks.algebra import Mask
from regard.scores.score import Score
from regard.traces import Trace

__all__ = ["BACKENDS", "attention", "trace"]

CuSeqlens = Tensor | tuple[Tensor, Tensor]
ARGUMENTS = "mask, score, bias, softcap, sink, scale, dropout, training, backend, cu_seqlens"


def attention(
    q: Float[Tensor, "*bh q d"] | Float[Tensor, "d"],
    k: Float[Tensor, "*bg k d2"],
    v: Float[Tensor, "*bg k e"],
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, "h"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    training: bool = False,
    backend: str | None = None,
    cu_seqlens: CuSeqlens | None = None,
    **others: Unknown,
) -> Float[Tensor, "*bh q e"] | Float[Tensor, "e"]:
    """Attention: each query's mean of the values, weighted by how well it matches the keys.

    Inputs are [B, H, N, D], or with more axes before H; or [B, N, D] or [N, D] for one head; one
    query [D] with keys and values [N, D] gives one output. Fewer key heads than query heads is
    grouped-query attention.

    - `mask`: which query may attend to which key, from `regard.masks`; all pairs by default.
    - `score`: how a query is compared with a key, from `regard.scores`; q·k / √D by default.
    - `bias`: what is added to the logits, from `regard.biases`.
    - `softcap`: c in c · tanh(logit / c), before bias and mask.
    - `sink`: one logit per head that joins the softmax, and whose weight no key gets.
    - `scale`: a factor in place of 1 / √D.
    - `dropout`: the share of weights dropped; only with `training=True`.
    - `backend`: a backend by name; if it cannot run the call, the error says why.

    Sequences of different lengths may be jagged nested tensors [B, H, j, D]; or tokens end to end,
    q [total_q, H, D], k [total_k, G, D] and v [total_k, G, E], with `cu_seqlens`: 0 and the end of
    each sequence, or a pair of such tensors for queries and keys. Then three axes are [tokens,
    heads, width], not [B, N, D], and the mask applies to each sequence by itself.

    >>> import torch, regard
    >>> q, k, v = torch.randn(3, 2, 8, 100, 64)
    >>> regard.attention(q, k, v, mask=regard.masks.causal()).shape
    torch.Size([2, 8, 100, 64])
    >>> q, k, v = torch.randn(3, 10, 8, 64)
    >>> ends = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> regard.attention(q, k, v, cu_seqlens=ends, mask=regard.masks.causal()).shape
    torch.Size([10, 8, 64])
    """
    if others:
        refuse_arguments("attention", others, ARGUMENTS)
    compiled = torch.compiler.is_compiling()
    plain = score is None and bias is None and sink is None and type(training) is bool
    plain = plain and not compiled
    seen = watched() if compiled else bool(watchers.get())
    # Watchers are shown a trace, so one is made, unless a backend is asked for by name.
    traced = seen and backend is None
    if plain and softcap is None and cu_seqlens is None and dropout == 0 and traced == seen:
        known = recent(q, k, v, mask, scale, backend, statistics=traced)
        if known is not None:
            if traced:
                return known.shown(q, k, v, mask).rows.out
            return known.run(q, k, v)  # type: ignore[return-value]
    if is_one_query(q, k):
        return attention(
            q[None], k, v, mask=mask, score=score, bias=bias, softcap=softcap, sink=sink,
            scale=scale, dropout=dropout, training=training, backend=backend,
            cu_seqlens=cu_seqlens,
        )[0]  # fmt: skip
    if cu_seqlens is not None:
        return _attend_tokens(
            q, k, v, cu_seqlens, mask, score=score, bias=bias, softcap=softcap, sink=sink,
            scale=scale, dropout=dropout, training=training, backend=backend,
        )  # fmt: skip
    kind = more = known = to_bind = None
    if plain and (dropout == 0 or _drops_none(dropout, training)):
        kind = kind_of(q, k, v, mask, scale, softcap, backend, traced)
        known = None if kind is None else found(kind)
    elif score is None and not (seen or compiled) and type(training) is bool:
        more = kind_with_more(
            q, k, v, mask, scale, softcap, backend, False, bias=bias, sink=sink, dropout=dropout,
            training=training,
        )  # fmt: skip
        known = found_with_more(more)
    if known is not None and kind is not None and softcap is None and dropout == 0:
        note(known, kind, (q, k, v), mask, scale, backend, statistics=traced)
    if known is not None and not seen:
        return known.run(q, k, v)  # type: ignore[return-value]
    binds = kind is None and score is None and sink is None and type(training) is bool
    binds = binds and not compiled
    if binds and (mask is not None or bias is not None) and _drops_none(dropout, training):
        # A backend that is asked for by name gives the output, whoever watches.
        to_bind = kind_to_bind(q, k, v, mask, scale, softcap, backend, traced, bias)
        bound = None if seen else found_to_bind(to_bind)
        if bound is not None:
            return bound.output(q, k, v, mask, bias)
    if traced and (kind is not None or to_bind is not None):
        if known is not None:
            return known.shown(q, k, v, mask).rows.out
        return trace(
            q, k, v, mask=mask, bias=bias, softcap=softcap, scale=scale, dropout=dropout
        ).rows.out  # fmt: skip
    if any_nested(q, k, v):
        return _attend_packed(
            pack(q, k, v, mask, bias), score=score, bias=bias, softcap=softcap, sink=sink,
            scale=scale, dropout=dropout, training=training, backend=backend,
        )  # fmt: skip
    inputs = check(
        q, k, v, mask=mask, score=score, bias=bias, softcap=softcap, sink=sink, scale=scale,
        dropout=dropout, training=training,
    )  # fmt: skip
    if inputs.q.is_meta:
        # There are no numbers: only what the answer would look like.
        return inputs.in_kind(inputs.q.new_empty(*inputs.shape[:3], inputs.v.shape[-1]))
    if seen:
        return inputs.in_kind(_attend_and_show(inputs, backend, mask))
    chosen = choose(inputs, backend, statistics=False)
    step = step_of(kind) if kind is not None and chosen.name == "sdpa" else None
    if step is not None:
        # It runs one query that sees all keys alike, whatever their number: no mask is needed.
        kind, inputs = step, replace(inputs, mask=None)
    if kind is not None:
        known = remember(kind, inputs, chosen, (q, k, v), mask, statistics=False)
    elif more is not None and chosen.name == "triton":
        given = (q, k, v)
        known = remember(more, inputs, chosen, given, mask, statistics=False, beside=(bias, sink))
        if known is not None and inputs.dropout:
            return known.run(q, k, v, inputs.seed)  # type: ignore[return-value]
    if known is not None:
        return known.run(q, k, v)  # type: ignore[return-value]
    if to_bind is not None:
        given = (q, k, v)
        bound = remember_to_bind(to_bind, inputs, given, mask, chosen, statistics=False)
        if bound is not None:
            return bound.output(q, k, v, mask, bias)
    return inputs.in_kind(chosen.attend(inputs))


def trace(
    q: Float[Tensor, "*bh q d"] | Float[Tensor, "d"],
    k: Float[Tensor, "*bg k d2"],
    v: Float[Tensor, "*bg k e"],
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, "h"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    training: bool = False,
    backend: str | None = None,
    cu_seqlens: CuSeqlens | None = None,
    **others: Unknown,
) -> Trace:
    """Attention that can be looked into: the same output, with every weight one question away.

    >>> import torch, regard
    >>> q, k, v = torch.randn(3, 2, 8, 100, 64)
    >>> t = regard.trace(q, k, v, mask=regard.masks.causal())
    >>> t.entropy.shape, t.received().shape, t.map(10).shape
    (torch.Size([2, 8, 100]), torch.Size([2, 8, 100]), torch.Size([2, 8, 10, 10]))

    Arguments are those of `regard.attention`. With `cu_seqlens` answers are [tokens, heads, ...],
    and `t[i]` is a trace of one sequence. One query [D] is traced as one row, [1, D].
    """
    if others:
        refuse_arguments("trace", others, ARGUMENTS)
    compiled = torch.compiler.is_compiling()
    plain = score is None and bias is None and sink is None and type(training) is bool
    plain = plain and not compiled
    if plain and softcap is None and cu_seqlens is None and dropout == 0:
        known = recent(q, k, v, mask, scale, backend, statistics=True)
        if known is not None:
            return known.shown(q, k, v, mask) if watchers.get() else known.trace(q, k, v, mask)
    if is_one_query(q, k):
        q = q[None]
    if cu_seqlens is not None:
        return _trace_tokens(
            q, k, v, cu_seqlens, mask, score=score, bias=bias, softcap=softcap, sink=sink,
            scale=scale, dropout=dropout, training=training, backend=backend,
        )  # fmt: skip
    kind = more = known = to_bind = None
    if plain and _drops_none(dropout, training):
        kind = kind_of(q, k, v, mask, scale, softcap, backend, True)
        known = None if kind is None else found(kind)
    elif score is None and type(training) is bool and not (compiled or watchers.get()):
        more = kind_with_more(
            q, k, v, mask, scale, softcap, backend, True, bias=bias, sink=sink, dropout=dropout,
            training=training,
        )  # fmt: skip
        known = found_with_more(more)
    if known is not None:
        if kind is not None and softcap is None and dropout == 0:
            note(known, kind, (q, k, v), mask, scale, backend, statistics=True)
        return known.shown(q, k, v, mask) if watched() else known.trace(q, k, v, mask)
    binds = kind is None and score is None and sink is None and type(training) is bool
    binds = binds and not compiled
    if binds and (mask is not None or bias is not None) and _drops_none(dropout, training):
        to_bind = kind_to_bind(q, k, v, mask, scale, softcap, backend, True, bias)
        bound = found_to_bind(to_bind)
        if bound is not None:
            return _shown(bound.trace, q, k, v, mask, bias)
    if any_nested(q, k, v):
        return _trace_packed(
            pack(q, k, v, mask, bias), mask, score=score, bias=bias, softcap=softcap, sink=sink,
            scale=scale, dropout=dropout, training=training, backend=backend,
        )  # fmt: skip
    inputs = check(
        q, k, v, mask=mask, score=score, bias=bias, softcap=softcap, sink=sink, scale=scale,
        dropout=dropout, training=training,
    )  # fmt: skip
    chosen = choose(inputs, backend, statistics=True)
    if kind is not None:
        known = remember(kind, inputs, chosen, (q, k, v), mask, statistics=True)
    elif more is not None and chosen.name == "triton":
        given = (q, k, v)
        known = remember(more, inputs, chosen, given, mask, statistics=True, beside=(bias, sink))
    if known is not None:
        return _shown(known.trace, q, k, v, mask, inputs.seed)
    if to_bind is not None:
        given = (q, k, v)
        bound = remember_to_bind(to_bind, inputs, given, mask, chosen, statistics=True)
        if bound is not None:
            return _shown(bound.trace, q, k, v, mask, bias)
    return _shown(_observed, inputs, chosen, mask)


_between_graphs = between_graphs(
    "regard reads cu_seqlens, whose numbers a graph does not know: compile without fullgraph=True, "
    "or use masks.documents(ids)"
)


@_between_graphs
def _attend_tokens(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens, mask: Mask | None, **options: Any
) -> Tensor:
    return _attend_packed(pack_tokens(q, k, v, cu_seqlens, mask, options["bias"]), **options)


@_between_graphs
def _trace_tokens(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens, mask: Mask | None, **options: Any
) -> Trace:
    return _trace_packed(pack_tokens(q, k, v, cu_seqlens, mask, options["bias"]), mask, **options)


def _attend_packed(packed: JaggedInputs, **options: Any) -> Tensor:
    return packed.sequences.queries.of(attention(*packed.qkv, mask=packed.mask, **options))


def _trace_packed(packed: JaggedInputs, mask: Mask | None, **options: Any) -> Trace:
    """One trace of all sequences, as traces of each."""
    x = trace(*packed.qkv, mask=packed.mask, **options)
    return JaggedTrace(x.inputs, x.rows, x.backend, x.second_pass, mask, packed.sequences)


def is_one_query(q: Any, k: Any) -> bool:
    """Whether a call is of one query [D] with keys [N, D]."""
    return isinstance(q, Tensor) and q.ndim == 1 and isinstance(k, Tensor) and k.ndim == 2


def _drops_none(dropout: float, training: bool) -> bool:
    """Whether a share of weights to drop is one, and none are dropped."""
    return dropout == 0 or (not training and type(dropout) is float and 0 < dropout < 1)


def _observed(inputs: AttentionInputs, chosen: Backend, mask: Mask | None) -> Trace:
    return Trace(inputs, chosen.observe(inputs), chosen.name, chosen.questions(), mask)


def _shown(make: Callable[..., Trace], *given: Any) -> Trace:
    """A trace, shown to watchers."""
    if not watched():
        return make(*given)
    # A watcher has PyTorch intercept every function that is called. Ours need not be intercepted,
    # and that takes longer than the GPU does.
    with torch._C.DisableTorchFunction():
        return show(make(*given))


def _attend_and_show(
    inputs: AttentionInputs, name: str | None, mask: Mask | None
) -> Float[Tensor, "b h q e"]:
    """The output, shown with its trace. A backend asked for by name still gives the output."""
    with torch._C.DisableTorchFunction():
        chosen = None if name is None else choose(inputs, name, statistics=False)
        seer = choose(inputs, name if chosen and chosen.observes else None, statistics=True)
    seen = _shown(_observed, inputs, seer, mask)
    if chosen is None or seer is chosen or changed():
        return seen.rows.out
    with unwatched():
        return chosen.attend(inputs)
