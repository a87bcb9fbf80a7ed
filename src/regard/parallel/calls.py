"""The public functions: check the call, compare it with the other ranks', share it, run it."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Rows
from regard.between_graphs import between_graphs
from regard.biases.bias import Bias
from regard.calls.watchers import watched
from regard.errors import RegardWarning
from regard.masks.algebra import Mask
from regard.parallel.call import Call, Method, Part, checked_call
from regard.parallel.choice import ParallelPlan, method_of, plan_of
from regard.parallel.handshake import agree, contents_of, described, refused_together
from regard.parallel.layout import Layout
from regard.parallel.parallel_trace import ParallelTrace
from regard.parallel.ranks import Mesh, ranks_of
from regard.scores.score import Score

_between_graphs = between_graphs(
    "regard.parallel compares calls between ranks, which a graph cannot: compile without "
    "fullgraph=True"
)


@_between_graphs
def attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g m d2"],
    v: Float[Tensor, "b g m e"],
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    method: str | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, "h"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    training: bool = False,
    backend: str | None = None,
    cu_seqlens: Any = None,
) -> Float[Tensor, "b h n e"]:
    """`regard.attention` of a sequence whose tokens are sharded over ranks: the output for this
    rank's queries.

    q, k and v are what this rank has by `layout` (by default as many tokens on each rank, in
    order), `mesh` are the ranks that share them (by default all). DTensors with placement Shard(2)
    carry both, and give DTensors. All other arguments are those of `regard.attention` for the whole
    sequence, the same on every rank. All ranks must make the
    call, and its backward pass.

    Gradients of q, k and v are those of the loss summed over the ranks. What a rank learns of a
    sink, bias or score is its own part, to be summed over the ranks, as of any parameter that sees
    only some tokens.
    """
    call, how, _ = _prepared(
        q, k, v, mesh, layout, key_layout, method, backend, trace=False, mask=mask, score=score,
        bias=bias, softcap=softcap, sink=sink, scale=scale, dropout=dropout, training=training,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    out = how.attend(backend)
    dtensors = _of_dtensors(q, k, v)
    if dtensors is None:
        return out
    placed: Tensor = dtensors.sharded(out, dtensors.mesh_of(None, q), call.layout)
    return placed


@_between_graphs
def trace(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g m d2"],
    v: Float[Tensor, "b g m e"],
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    method: str | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, "h"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    training: bool = False,
    backend: str | None = None,
    cu_seqlens: Any = None,
) -> ParallelTrace:
    """`regard.trace` of a sequence whose tokens are sharded over ranks. Arguments are those of
    `parallel.attention`."""
    call, how, mask = _prepared(
        q, k, v, mesh, layout, key_layout, method, backend, trace=True, mask=mask, score=score,
        bias=bias, softcap=softcap, sink=sink, scale=scale, dropout=dropout, training=training,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    part: Part = how.observe(backend)
    rows = Rows(*how.of_rows(part.out, part.lse, part.max_logit, part.entropy))
    dtensors = _of_dtensors(q, k, v)
    if dtensors is None:
        return ParallelTrace(call, how, part, rows, mask)
    found: ParallelTrace = dtensors.DTensorTrace(
        call, how, part, rows, mask, mesh=dtensors.mesh_of(None, q)
    )
    return found


def plan(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b g m d2"],
    v: Float[Tensor, "b g m e"],
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    method: str | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, "h"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    training: bool = False,
    cu_seqlens: Any = None,
) -> ParallelPlan:
    """How ranks would share a call, and why. Runs nothing, and asks no other rank. For what runs
    on each rank, use `regard.plan`."""
    dtensors = _of_dtensors(q, k, v)
    if dtensors is not None:
        mesh = dtensors.mesh_of(mesh, q, k, v)
        q, k, v, layout, key_layout = dtensors.locals_of(q, k, v, mesh, layout, key_layout)
    call = checked_call(
        q, k, v, ranks_of(mesh), layout, key_layout, mask=mask, score=score, bias=bias,
        softcap=softcap, sink=sink, scale=scale, dropout=dropout, training=training,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return plan_of(call, method)


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh | None,
    layout: Layout | None,
    key_layout: Layout | None,
    method: str | None,
    backend: str | None,
    *,
    trace: bool,
    mask: Mask | None,
    **options: Any,
) -> tuple[Call, Method[Any], Mask | None]:
    """A call that is right here, and the same on all ranks."""
    dtensors = _of_dtensors(q, k, v)
    mesh = mesh if dtensors is None else dtensors.mesh_of(mesh, q, k, v)
    ranks = ranks_of(mesh)
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    with refused_together(ranks, device):
        if dtensors is not None:
            q, k, v, layout, key_layout = dtensors.locals_of(q, k, v, mesh, layout, key_layout)
        call = checked_call(q, k, v, ranks, layout, key_layout, mask=mask, **options)
        how = method_of(call, method)
        how.check(backend, statistics=trace)
        facts = _facts(call, how, mask, backend, trace=trace, options=options)
    agree(ranks, device, facts, lambda: contents_of(mask=mask))
    if watched():
        warnings.warn(
            "regard.watch does not see the calls of regard.parallel: keep what "
            "regard.parallel.trace gives",
            RegardWarning,
            stacklevel=3,
        )
    return call, how, mask


def _of_dtensors(*tensors: Any) -> Any:
    """What is known of DTensors, if one of these is one. Their library takes long to import; where
    one exists it has been imported already."""
    library = sys.modules.get("torch.distributed.tensor")
    if library is None or not any(isinstance(t, library.DTensor) for t in tensors):
        return None
    from regard.parallel import dtensors

    return dtensors


def _facts(
    call: Call,
    how: Method[Any],
    mask: Mask | None,
    backend: str | None,
    *,
    trace: bool,
    options: Any,
) -> dict[str, str]:
    x = call.inputs
    learns = [t.requires_grad and torch.is_grad_enabled() for t in x.tensors()]
    named = {"q": x.q, "k": x.k, "v": x.v}
    return {
        "function": "trace" if trace else "attention",
        **{name: _without_tokens(t) for name, t in named.items()},
        "layout": _of_layout(call.layout),
        "key_layout": _of_layout(call.key_layout),
        "method": how.name,
        "mask": described(mask),
        "backend": repr(backend),
        "which tensors want gradients": str(learns),
        **{name: described(value) for name, value in options.items()},
    }


def _without_tokens(t: Tensor) -> str:
    B, H, _, D = t.shape
    return f"{str(t.dtype).removeprefix('torch.')} [{B}, {H}, tokens, {D}]"


def _of_layout(layout: Layout) -> str:
    return f"{layout!r}, runs {hash(layout.runs) & 0xFFFFFFFF:08x}"
