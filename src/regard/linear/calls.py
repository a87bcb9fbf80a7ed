"""The calls: linear attention, and a trace of it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.passes import no_autocast
from regard.calls.choice import choose
from regard.calls.given_traces import GivenRows
from regard.errors import RegardError
from regard.inputs import AttentionInputs, check
from regard.linear.features import (
    FeatureMap,
    as_it_is,
    elu_plus_one,
    is_fixed,
    largest,
    of_keys,
    of_queries,
    refuse_no_map,
)
from regard.linear.kernel import mixed
from regard.linear.order import Order, order_of, without_window
from regard.linear.state import State, refuse_no_state
from regard.masks.algebra import Mask
from regard.scores.comparison import FeatureProduct, logarithm
from regard.scores.dot import dot
from regard.traces import Trace
from regard.values import readable, whole

CHUNK = 64


def attention(
    q: Float[Tensor, "*bh q d"],
    k: Float[Tensor, "*bg k d"],
    v: Float[Tensor, "*bg k e"],
    *,
    features: FeatureMap = elu_plus_one,
    mask: Mask | None = None,
    state: State | None = None,
    chunk: int = CHUNK,
    backend: str | None = None,
) -> Float[Tensor, "*bh q e"]:
    """Σ φ(q)·φ(k) v / Σ φ(q)·φ(k), in time and memory that grow with the length.

    `features` is φ: `elu_plus_one`, `torch.relu`, `random_features(width, count)`, or any function
    to numbers of 0 or more. `mask` is `causal()`, `window(left, right)`, `padding(lengths)`,
    `documents(ids)`, or several joined by `&`. With `state`, and without a window, the call goes on
    from the tokens that the state has seen, which every query sees. A query whose features meet no
    key's gives 0. On CUDA, Triton's kernels run the calls that they can, and PyTorch's operations
    the others; `backend` asks for "triton" or "tiled" by name. (`chunk` is of the latter.)

    >>> import torch
    >>> from regard import linear, masks
    >>> q, k, v = torch.randn(3, 1, 2, 1000, 16)
    >>> linear.attention(q, k, v, mask=masks.causal()).shape
    torch.Size([1, 2, 1000, 16])
    """
    refuse_no_map(features)
    refuse_no_state(state)
    x, order = checked(q, k, v, mask, chunk)
    if state is not None:
        without_window(
            order, mask, "nn.Cache(window=w) with nn.MultiHeadAttention, or linear.gated"
        )
    return x.in_kind(mixed(x.q, x.k, x.v, features, order, chunk, state, backend).out)


def trace(
    q: Float[Tensor, "*bh q d"],
    k: Float[Tensor, "*bg k d"],
    v: Float[Tensor, "*bg k e"],
    *,
    features: FeatureMap = elu_plus_one,
    mask: Mask | None = None,
    chunk: int = CHUNK,
    backend: str | None = None,
) -> Trace:
    """A trace of the same call: its weights are φ(q)·φ(k) / Σ φ(q)·φ(k).

    Logits are logarithms of φ(q)·φ(k), with random features up to a number for each row. The output
    and lse come from the linear pass; whatever is asked about pairs takes O(n²) time, block by
    block, and O(n) memory.

    >>> import torch
    >>> from regard import linear, masks
    >>> q, k, v = torch.randn(3, 1, 2, 100, 16)
    >>> t = linear.trace(q, k, v, mask=masks.causal())
    >>> t.received().sum().round()
    tensor(200.)
    """
    refuse_no_map(features)
    x, order = checked(q, k, v, mask, chunk)
    seen = order.seen(x.shape.K, x.k.device)
    with no_autocast(x.q):
        dtype = x.compute_dtype
        wide_k = x.k.to(dtype)
        shift = largest(features, wide_k, seen)
        if shift is not None:
            shift = torch.where(shift.isinf(), 0.0, shift)
        a = of_queries(features, x.q.to(dtype))
        b = of_keys(features, wide_k, shift, seen)
        _check_shares(features, a, b)
        out, total = mixed(a, b, x.v, as_it_is, order, chunk, backend=backend)
    held = AttentionInputs(a, b, x.v.to(dtype), FeatureProduct(), x.mask, rank=x.rank, lead=x.lead)
    known = {"out": out, "lse": logarithm(total.squeeze(-1))}
    asked = choose(held, None, statistics=True)
    rows: Rows = GivenRows(known, lambda: asked.observe(held), values=True)
    return Trace(held, rows, asked.name, asked.questions(), mask)


def checked(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, chunk: int
) -> tuple[AttentionInputs, Order]:
    """A call in the form that all of them take, and what its mask says."""
    if whole("chunk", chunk) < 1:
        raise RegardError("chunk counts keys", got=f"chunk={chunk}", accepted="1 or more")
    x = check(
        q, k, v, mask=mask, score=dot(), bias=None, softcap=None, sink=None, scale=None,
        dropout=0.0, training=False,
    )  # fmt: skip
    return x, order_of(x.mask, x.shape, mask)


def _check_shares(features: FeatureMap, *found: Tensor) -> None:
    if is_fixed(features) or not all(map(readable, found)):
        return
    if any(bool((t < 0).any()) for t in found):
        raise RegardError(
            "features below 0 give negative weights",
            got=f"{getattr(features, '__name__', features)!s}, with numbers below 0",
            accepted="features of 0 or more",
            do="linear.attention for the output alone",
        )
