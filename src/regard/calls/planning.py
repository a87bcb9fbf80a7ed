"""What would run a call, and what it would cost, without running it."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from regard.biases.bias import Bias
from regard.calls.choice import choose, refusals
from regard.calls.dispatch import ARGUMENTS, CuSeqlens, is_one_query
from regard.calls.peer_arguments import Unknown, refuse_arguments
from regard.calls.plans import Plan
from regard.cost.call_counts import dense_pairs, forward_flops, least_bytes, needed_pairs
from regard.inputs import check
from regard.jagged import any_nested, pack, pack_tokens
from regard.masks.algebra import Mask
from regard.scores.score import Score


def plan(
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
    statistics: bool = False,
    **others: Unknown,
) -> Plan:
    """Which backend would run a call, why not the others, and what it costs. Runs nothing.

    `statistics=True` plans `trace` instead of `attention`.

    >>> import torch, regard
    >>> x = torch.zeros(1, 2, 1024, 64)
    >>> plan = regard.plan(x, x, x, mask=regard.masks.causal(), statistics=True)
    >>> print(plan)  # doctest: +ELLIPSIS
    trace of q [1, 2, 1024, 64], k [1, 2, 1024, 64], v [1, 2, 1024, 64], float32 on cpu, mask=...
      backend         tiled
      inner loop      ...
      not sdpa        it keeps no row statistics
      not triton      its kernels run on CUDA; elsewhere only interpreted, with TRITON_INTERPRET=1
      not flex        it reports no entropy...
      not reference   runs only when asked for: it builds the n×n matrix
      needed FLOPs    269 M (50.0% of dense)
      executed FLOPs  302 M (56.2% of dense)
      dense FLOPs     537 M (100.0% of dense)
      bytes moved     2.1 MB
      peak memory     ...B beside the inputs
    """
    if others:
        refuse_arguments("plan", others, f"{ARGUMENTS}, statistics")
    if is_one_query(q, k):
        q = q[None]
    if cu_seqlens is not None or any_nested(q, k, v):
        packed = (
            pack(q, k, v, mask, bias)
            if cu_seqlens is None
            else pack_tokens(q, k, v, cu_seqlens, mask, bias)
        )
        (q, k, v), mask = packed.qkv, packed.mask
    inputs = check(
        q, k, v, mask=mask, score=score, bias=bias, softcap=softcap, sink=sink, scale=scale,
        dropout=dropout, training=training,
    )  # fmt: skip
    chosen = choose(inputs, backend, statistics=statistics)
    work = chosen.work(inputs, statistics=statistics)
    B, H, Q, _ = inputs.shape
    rows = B * H * Q * (3 if statistics else 0) * inputs.compute_dtype.itemsize
    output = B * H * Q * inputs.v.shape[-1] * inputs.v.element_size()
    kind = "trace" if statistics else "attention"
    dtype = str(q.dtype).removeprefix("torch.")
    call = (
        f"{kind} of q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, {dtype} on {q.device}"
    )
    return Plan(
        call=call + ("" if mask is None else f", mask={mask!r}"),
        backend=chosen.name,
        refusals=refusals(inputs, chosen, backend, statistics=statistics),
        flops_needed=forward_flops(inputs, needed_pairs(inputs)),
        flops_executed=forward_flops(inputs, work.pairs),
        flops_dense=forward_flops(inputs, dense_pairs(inputs)),
        bytes_moved=least_bytes(inputs),
        peak_memory=output + rows + work.scratch,
        inner_loop=work.inner_loop,
    )
