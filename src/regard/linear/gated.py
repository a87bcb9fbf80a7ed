"""Linear attention that forgets: what is past fades (gated), or is corrected (the delta rule).

Neither divides by a sum of weights. A weight is what a value's entry in the output is multiplied
with; it may be negative, and those of a row sum to nothing in particular.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from regard.arguments import described
from regard.backends.passes import no_autocast
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.linear.calls import CHUNK, checked
from regard.linear.order import without_window
from regard.linear.recurrence import Recurrence
from regard.linear.signed_trace import SignedTrace
from regard.linear.state import State, refuse_no_state
from regard.masks.algebra import Mask
from regard.scores.score import finite_scale
from regard.values import readable


def gated(
    q: Float[Tensor, "*bh n d"],
    k: Float[Tensor, "*bg n d"],
    v: Float[Tensor, "*bg n e"],
    log_decay: Float[Tensor, "..."],
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    state: State | None = None,
    chunk: int = CHUNK,
    backend: str | None = None,
) -> Float[Tensor, "*bh n e"]:
    """S_i = exp(log_decay_i) S_{i-1} + k_i v_iᵀ, read by scale · q_i (1/√D unless said).

    `log_decay` is 0 or less: one number for each key head and token (k's axes without the last), or
    one for each channel too (k's axes). It is causal by itself; `mask` adds `padding(lengths)` or
    `documents(ids)`. On CUDA Triton's kernels run it from 64 tokens on, with one decay for each
    head; PyTorch's operations do the rest. `backend` asks for "triton" or "tiled" by name, and says
    why kernels cannot run a call.

    >>> import torch
    >>> from regard import linear
    >>> q, k, v = torch.randn(3, 1, 2, 100, 16)
    >>> linear.gated(q, k, v, -torch.rand(1, 2, 100)).shape
    torch.Size([1, 2, 100, 16])
    """
    call = _call(q, k, v, log_decay, None, scale, mask, chunk, backend)
    refuse_no_state(state)
    with no_autocast(q):
        return call.inputs.in_kind(call.run(state))


def delta(
    q: Float[Tensor, "*bh n d"],
    k: Float[Tensor, "*bg n d"],
    v: Float[Tensor, "*bg n e"],
    beta: Float[Tensor, "..."],
    log_decay: Float[Tensor, "..."] | None = None,
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    state: State | None = None,
    chunk: int = CHUNK,
    backend: str | None = None,
) -> Float[Tensor, "*bh n e"]:
    """S_i = a S_{i-1} + β_i k_i (v_i - a S_{i-1}ᵀ k_i)ᵀ: the value that the state holds for a key
    moves by the share β to the new one. Read by scale · q_i (1/√D unless said).

    `beta` has one number for each key head and token, as `log_decay` = log a if there is one. Keys
    should be of length 1 (β |k|² above 2 makes the state grow without bound). `backend` is as that
    of `gated`.

    >>> import torch
    >>> from regard import linear
    >>> q, k, v = torch.randn(3, 1, 2, 100, 16)
    >>> k = torch.nn.functional.normalize(k, dim=-1)
    >>> linear.delta(q, k, v, torch.rand(1, 2, 100)).shape
    torch.Size([1, 2, 100, 16])
    """
    _refuse_no_beta(beta)
    call = _call(q, k, v, log_decay, beta, scale, mask, chunk, backend)
    refuse_no_state(state)
    with no_autocast(q):
        return call.inputs.in_kind(call.run(state))


def gated_trace(
    q: Float[Tensor, "*bh n d"],
    k: Float[Tensor, "*bg n d"],
    v: Float[Tensor, "*bg n e"],
    log_decay: Float[Tensor, "..."],
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    chunk: int = CHUNK,
    backend: str | None = None,
) -> SignedTrace:
    """What `gated` gives, with weights to look into: scale · q_i·k_j, faded from j to i.

    >>> import torch
    >>> from regard import linear
    >>> one = torch.ones(3, 1)
    >>> linear.gated_trace(one, one, one, torch.full((3,), 0.5).log()).weights()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 1.0000, 0.0000],
            [0.2500, 0.5000, 1.0000]])
    """
    return SignedTrace(_call(q, k, v, log_decay, None, scale, mask, chunk, backend), mask)


def delta_trace(
    q: Float[Tensor, "*bh n d"],
    k: Float[Tensor, "*bg n d"],
    v: Float[Tensor, "*bg n e"],
    beta: Float[Tensor, "..."],
    log_decay: Float[Tensor, "..."] | None = None,
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    chunk: int = CHUNK,
    backend: str | None = None,
) -> SignedTrace:
    """What `delta` gives, with weights to look into: what is left of a value, after all that was
    corrected since, where the query reads.

    >>> import torch
    >>> from regard import linear
    >>> one = torch.ones(3, 1)
    >>> linear.delta_trace(one, one, one, torch.full((3,), 0.5)).weights()
    tensor([[0.5000, 0.0000, 0.0000],
            [0.2500, 0.5000, 0.0000],
            [0.1250, 0.2500, 0.5000]])
    """
    _refuse_no_beta(beta)
    return SignedTrace(_call(q, k, v, log_decay, beta, scale, mask, chunk, backend), mask)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    mask: Mask | None,
    chunk: int,
    backend: str | None,
) -> Recurrence:
    x, order = checked(q, k, v, mask, chunk)
    without_window(order, mask, "leave the window out: what is past fades by log_decay")
    if x.shape.Q != x.shape.K:
        raise RegardError(
            "a recurrence runs along one sequence",
            got=f"{x.shape.Q} queries and {x.shape.K} keys",
            accepted="as many queries as keys",
            do="state= to go on from earlier keys",
        )
    decay = log_decay
    if log_decay is not None or beta is None:
        decay = _per_token(log_decay, x, "log_decay", channels=True)
    rate = None if beta is None else _per_token(beta, x, "beta", channels=False)
    if decay is not None and decay.shape[-1] > 1 and rate is not None:
        raise RegardError(
            "the delta rule takes one decay for all channels of a head",
            got=f"log_decay {list(decay.shape)}",
            accepted="one number for each key head and token",
        )
    if decay is not None and readable(decay) and bool((decay > 0).any()):
        raise RegardError(
            "log_decay is the logarithm of a factor of at most 1",
            got=f"{float(decay.max()):.3g}",
            accepted="numbers of 0 or less",
            do="torch.nn.functional.logsigmoid(x) makes such",
        )
    scale = max(x.q.shape[-1], 1) ** -0.5 if scale is None else finite_scale(scale)
    return Recurrence(x, order, decay, rate, scale, chunk, backend)


def _refuse_no_beta(beta: object) -> None:
    if beta is None:
        raise RegardError(
            "beta has a number for each key head and token",
            got="None",
            accepted="a tensor",
            do="linear.gated for a state that nothing is replaced in",
        )


def _per_token(
    t: Tensor | None, x: AttentionInputs, name: str, *, channels: bool
) -> Float[Tensor, "b g n m"]:
    """Numbers of each key head and token as [B, G, N, 1], or of each channel too."""
    B, G, N, D = x.k.shape
    alone = x.in_kind(x.k[..., 0]).shape
    if isinstance(t, Tensor) and not t.is_complex() and t.device == x.k.device:
        if t.shape == alone:
            return t.reshape(B, G, N, 1)
        if channels and tuple(t.shape) == (*alone, D):
            return t.reshape(B, G, N, D)
    axes = f"{list(alone)} or {[*alone, D]}" if channels else str(list(alone))
    raise RegardError(
        f"{name} has a number for each key head and token",
        got=described(t) + (f" on {t.device}" if isinstance(t, Tensor) else ""),
        accepted=f"{axes} on {x.k.device}",
    )
