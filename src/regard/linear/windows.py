"""Sums over the last keys only, some tokens at a time.

    out_i = Σ_{i - left ≤ j ≤ i} (q_i·k_j) v_j

A chunk of queries meets three kinds of chunks of keys: its own and those at the far end of the
window are seen in part, and taken pair by pair; those between are seen whole, and enter as one sum.
That sum slides along. Taking out what leaves it would cancel digits, so nothing is ever taken out:
between two marks, as many chunks apart as the sum is long, sums run forward from one mark and
backward from the next, and what lies across a mark is one of either (van Herk's way to slide).

Shapes are those of `chunks`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from regard.linear.chunks import Decays, decays, in_chunks, kept

NONE = Decays(None, None, None, None)


def windowed(
    q: Float[Tensor, "b g r n m"],
    k: Float[Tensor, "b g n m"],
    v: Float[Tensor, "b g n e"],
    runs: Int[Tensor, "#b 1 n 1"] | None,
    sides: tuple[int, int],
    chunk: int,
) -> Float[Tensor, "b g r n e"]:
    """What each query reads of so many keys before it, itself, and so many after it."""
    left, right = (min(side, q.shape[-2] - 1) for side in sides)
    found = _behind(q, k, v, runs, (0, left), chunk)
    if right > 0:
        q, k, v = (t.flip(-2) for t in (q, k, v))
        runs = None if runs is None else runs.flip(-2)
        found = found + _behind(q, k, v, runs, (1, right), chunk).flip(-2)
    return found


def _behind(
    q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None, gaps: tuple[int, int], chunk: int
) -> Tensor:
    """What queries read of keys that are so many places before them, from the least to the most."""
    n, (least, most) = q.shape[-2], gaps
    of = NONE if runs is None else decays(None, runs, runs[:, 0, 0, 0], chunk, q.dtype)
    ids = None if runs is None else in_chunks(runs, chunk)
    q, k, v = (in_chunks(t, chunk) for t in (q, k, v))
    count, whole = k.shape[2], max((most + 1 - chunk) // chunk, 0)
    place = torch.arange(chunk, device=q.device)
    out: Tensor | None = None
    for back in (0, *range(whole + 1, min(-(-most // chunk), count - 1) + 1)):
        gap = place[:, None] - place + back * chunk
        allowed = (gap >= least) & (gap <= most)
        theirs, ours = slice(count - back), slice(back, count)
        if ids is not None:
            allowed = allowed & (ids[:, :, ours] == ids[:, :, theirs].mT)[:, :, None]
        scores = q[:, :, :, ours] @ k[:, :, None, theirs].mT
        here = torch.where(allowed, scores, 0.0) @ v[:, :, None, theirs]
        here = pad(here, (0, 0, 0, 0, back, 0))
        out = here if out is None else out + here
    assert out is not None
    if whole:
        sums = sliding(kept(k, of.into).mT @ v, of.carried, whole)
        out = out + kept(q, None if of.reads is None else of.reads[:, :, None]) @ sums[:, :, None]
    return out.flatten(3, 4)[:, :, :, :n]


def sliding(
    added: Float[Tensor, "b g c m e"], carried: Float[Tensor, "#b 1 c 1 1"] | None, many: int
) -> Float[Tensor, "b g c m e"]:
    """The sum of so many chunks before each; `carried` is 0 where a chunk ends in another document
    than the one before it, and what was before is forgotten."""
    count = added.shape[2]
    fill = (0, 0, 0, 0, many, -(count + many) % many)
    blocks = pad(added, fill).unflatten(2, (-1, many))
    before = torch.arange(count, device=added.device)
    if carried is None:
        ahead, lasting = blocks.cumsum(3), None
        until = blocks.flip(3).cumsum(3).flip(3)
    else:
        left = pad(carried, fill, value=1.0).unflatten(2, (-1, many))
        lasting = left.cumprod(3).flatten(2, 3)
        after = pad(left[:, :, :, 1:], (0, 0, 0, 0, 0, 1), value=1.0)
        until = (blocks * after.flip(3).cumprod(3).flip(3)).flip(3).cumsum(3).flip(3)
        states = [blocks[:, :, :, 0]]
        for i in range(1, many):
            states.append(states[-1] * left[:, :, :, i] + blocks[:, :, :, i])
        ahead = torch.stack(states, 3)
    # A sum that begins at a mark is all of it ahead.
    crosses = (before % many != 0)[:, None, None]
    ending = slice(many - 1, many - 1 + count)
    first = torch.where(crosses, until.flatten(2, 3)[:, :, :count], 0.0)
    rest: Tensor = ahead.flatten(2, 3)[:, :, ending]
    return rest + kept(first, None if lasting is None else lasting[:, :, ending])
