"""What rows saw of some keys each, as what they saw of all of them."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Rows
from regard.errors import RegardError


def merge(*parts: Rows) -> Rows:
    """Rows of the same queries over different keys, as rows over all of these keys. In any order,
    and any of them merged before. A sink belongs to one of the parts only.

    Each part counts by its share w of the sum: w = exp(lse of the part − lse). Outputs are mixed
    by it; entropies by the chain rule, Σ w (entropy of the part − log w), which has no large
    numbers to subtract.

    >>> import regard, torch
    >>> q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 10, 4)
    >>> some, others = (regard.trace(q, part, part).rows for part in (k[:, :, :7], k[:, :, 7:]))
    >>> torch.allclose(merge(some, others).entropy, regard.trace(q, k, k).entropy, atol=1e-5)
    True
    """
    if not parts:
        raise RegardError("merge takes rows", got="none", accepted="one part or more")
    lse = torch.stack([part.lse for part in parts])
    total = lse.logsumexp(0)
    nothing = total == -math.inf
    away = lse - torch.where(nothing, 0.0, total)
    # The gradient of exp at a part that saw nothing is 0, and not 0 · ∞.
    absent = lse == -math.inf
    log_share = torch.where(absent, 0.0, away)
    share = torch.where(absent, 0.0, log_share.exp())
    out = sum(
        w[..., None].to(part.out.dtype) * part.out for w, part in zip(share, parts, strict=True)
    )
    entropy = (share * (torch.stack([part.entropy for part in parts]) - log_share)).sum(0)
    largest = torch.stack([part.max_logit for part in parts]).amax(0)
    assert isinstance(out, Tensor)
    return Rows(out, total, largest, entropy)


def rows_of_sink(sink: Float[Tensor, "h"], like: Rows) -> Rows:
    """A sink as rows that saw one more place, which gives nothing."""
    lse = sink.to(like.lse.dtype)[:, None].expand_as(like.lse)
    zeros = torch.zeros_like(like.lse)
    return Rows(torch.zeros_like(like.out), lse, torch.full_like(zeros, -math.inf), zeros)
