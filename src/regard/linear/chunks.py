"""Running sums of key-value products, some tokens at a time.

    S_i = a_i S_{i-1} + k_i v_iᵀ        out_i = q_i S_i = Σ_{j ≤ i} (q_i·k_j) a_{j+1} … a_i v_j

Within a chunk the pairs are taken one by one, as a small matrix; all earlier chunks are in S. The
decay a is 1, one number for each head and token, or one for each channel too. Where a document
begins it is 0, whatever it is otherwise.

Shapes here: q [B, G, R, N, M] (R query heads share a key head), k [B, G, N, M], v [B, G, N, E], log
decay [B, G, N, 1 or M], runs [B, 1, N, 1], S [B, G, M, E].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

SLOWEST = -1000.0
"""A logarithm of decay below this is treated as minus infinity: its exponential is 0 in float64
too."""


class Decays(NamedTuple):
    """What is left of things, chunk by chunk; None is all of it. With one number for each channel
    there is a last axis M, and `within` is [B, G, c, C, C, M]."""

    within: Tensor | None
    """Of a key when a query of its chunk reads it: [B, G, c, C, C, 1 or M]."""
    reads: Tensor | None
    """Of the state before a chunk when a query in it reads it: [B, G, c, C, 1 or M]."""
    into: Tensor | None
    """Of a key at the end of its chunk: [B, G, c, C, 1 or M]."""
    carried: Tensor | None
    """Of the state before a chunk at its end: [B, G, c, 1 or M, 1]."""


def in_chunks(t: Tensor, chunk: int) -> Tensor:
    """[..., N, D] as [..., c, C, D], filled up with zeros."""
    t = pad(t, (0, 0, 0, -t.shape[-2] % chunk))
    return t.reshape(*t.shape[:-2], t.shape[-2] // chunk, chunk, t.shape[-1])


def decays(
    log_decay: Float[Tensor, "b g n m"] | None,
    runs: Int[Tensor, "b 1 n 1"] | None,
    start: Int[Tensor, "b"] | None,
    chunk: int,
    dtype: torch.dtype,
) -> Decays:
    """The decays of a sequence; `start` is the number of the document that the state is of."""
    found = Decays(None, None, None, None)
    if log_decay is not None:
        found = _fading(in_chunks(log_decay, chunk), dtype)
    if runs is None:
        return found
    assert start is not None
    fill = -runs.shape[-2] % chunk
    runs = torch.cat([runs, runs[:, :, -1:].expand(-1, -1, fill, -1)], 2).unflatten(2, (-1, chunk))
    ends = runs[:, :, :, -1:]
    before = torch.cat([start.view(-1, 1, 1, 1, 1).expand_as(ends[:, :, :1]), ends[:, :, :-1]], 2)
    same = Decays(
        (runs[..., None, :] == runs[..., None, :, :]),
        runs == before,
        runs == ends,
        before == ends,
    )
    both = [
        (b.to(dtype) if a is None else torch.where(b, a, 0.0))
        for a, b in zip(found, same, strict=True)
        if b is not None
    ]
    return Decays(*both)


def _fading(steps: Float[Tensor, "b g c n m"], dtype: torch.dtype) -> Decays:
    # In float64: differences of large sums are small.
    total = steps.to(torch.float64).clamp_min(SLOWEST).cumsum(-2)
    end = total[..., -1:, :]
    apart = total[..., :, None, :] - total[..., None, :, :]
    size = total.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=steps.device).triu(1)[..., None]
    within = apart.masked_fill(later, 0.0).to(dtype).exp()
    return Decays(
        within, total.to(dtype).exp(), (end - total).to(dtype).exp(), end.mT.to(dtype).exp()
    )


def kept(t: Tensor, decay: Tensor | None) -> Tensor:
    return t if decay is None else t * decay


def products(
    q: Float[Tensor, "b g r c i m"], k: Float[Tensor, "b g c j m"], within: Tensor | None, diag: int
) -> Float[Tensor, "b g r c i j"]:
    """q_i·k_j of the pairs within chunks, decayed; 0 where j is later than i + diag."""
    if within is not None and within.shape[-1] > 1:
        # One channel after the other fades at its own pace: no plain product says that.
        faded = k[..., None, :, :] * within
        scores = (q[..., None, :] * faded[:, :, None]).sum(-1)
    else:
        scores = q @ k[:, :, None].mT
        scores = scores if within is None else scores * within[:, :, None].squeeze(-1)
    return scores.tril(diag)


def running(
    q: Float[Tensor, "b g r n m"],
    k: Float[Tensor, "b g n m"],
    v: Float[Tensor, "b g n e"],
    state: Float[Tensor, "b g m e"],
    of: Decays,
    chunk: int,
    *,
    diag: int = 0,
) -> tuple[Float[Tensor, "b g r n e"], Float[Tensor, "b g m e"]]:
    """What each query reads of the running sum, and the sum at the end. With `diag=-1` a query does
    not see its own key."""
    n = q.shape[-2]
    q, k, v = (in_chunks(t, chunk) for t in (q, k, v))
    before, last = _sums(kept(k, of.into).mT @ v, state, of.carried)
    scores = products(q, k, of.within, diag)
    reads = None if of.reads is None else of.reads[:, :, None]
    out = scores @ v[:, :, None] + kept(q, reads) @ before[:, :, None]
    return out.flatten(3, 4)[:, :, :, :n], last


def _sums(
    added: Float[Tensor, "b g c m e"], state: Float[Tensor, "b g m e"], carried: Tensor | None
) -> tuple[Float[Tensor, "b g c m e"], Float[Tensor, "b g m e"]]:
    """The state before each chunk, and after the last."""
    if carried is None:
        through = torch.cat([state[:, :, None], added], 2).cumsum(2)
        return through[:, :, :-1], through[:, :, -1]
    before = []
    for here, left in zip(added.unbind(2), carried.unbind(2), strict=True):
        before.append(state)
        state = state * left + here
    return torch.stack(before, 2) if before else added, state


def correcting(
    q: Float[Tensor, "b g r n m"],
    k: Float[Tensor, "b g n m"],
    v: Float[Tensor, "b g n e"],
    beta: Float[Tensor, "b g n 1"],
    state: Float[Tensor, "b g m e"],
    of: Decays,
    chunk: int,
) -> tuple[Float[Tensor, "b g r n e"], Float[Tensor, "b g m e"]]:
    """The delta rule: of each value only what the state does not say of its key yet is written,

        S_i = a_i S_{i-1} + β_i k_i (v_i - a_i S_{i-1}ᵀ k_i)ᵀ.

    What is written within a chunk depends on what was written before in it: a triangular system."""
    n = q.shape[-2]
    q, k, v = (in_chunks(t, chunk) for t in (q, k, v))
    solved = corrections(k, in_chunks(beta, chunk), of)
    scores = products(q, k, of.within, 0)
    read_q = kept(q, None if of.reads is None else of.reads[:, :, None])
    read_k, into = kept(k, of.reads), kept(k, of.into).mT
    outs = []
    for c in range(q.shape[3]):
        written = solved[:, :, c] @ (v[:, :, c] - read_k[:, :, c] @ state)
        out = scores[:, :, :, c] @ written[:, :, None] + read_q[:, :, :, c] @ state[:, :, None]
        outs.append(out)
        left = state if of.carried is None else state * of.carried[:, :, c]
        state = left + into[:, :, c] @ written
    whole = torch.cat(outs, 3) if outs else q.new_zeros(*q.shape[:3], 0, v.shape[-1])
    return whole[:, :, :, :n], state


def corrections(
    k: Float[Tensor, "b g c n m"], beta: Float[Tensor, "b g c n 1"], of: Decays
) -> Float[Tensor, "b g c n n"]:
    """T of `written = T (v - what the state before the chunk says)`: (I + L)⁻¹ diag(β), where L are
    the products of later keys with earlier ones, times β."""
    overlap = products(k[:, :, None], k, of.within, -1)[:, :, 0] * beta
    one = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    inverse: Tensor = torch.linalg.solve_triangular(
        overlap + one, one.expand_as(overlap), upper=False, unitriangular=True
    )
    return inverse * beta.mT
