"""The formulas over all pairs at once, by which sharded answers are judged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.masks import Mask
from regard.values import Shape

MAP = (4, 3)
QUERIES = [0, 5, 17, 36, 5]
KEYS = [1, 2, 30]
HEADS = [3, 0]
REGION = ((3, 34), (2, 37))
BLOCK = (6, 5)
BLOCKS = torch.rand(4, 7, 8, generator=torch.Generator().manual_seed(7)) < 0.5
"""Which blocks of keys each head keeps."""


@dataclass
class Whole:
    """q, k and v of all tokens, and what is said beside them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    options: dict[str, Any]

    def answers(self) -> dict[str, Tensor]:
        q, G = self.q, self.k.shape[1]
        group = q.shape[1] // G
        k, v = (t.repeat_interleave(group, 1) for t in (self.k, self.v))
        s = q @ k.mT * self.options.get("scale", q.shape[-1] ** -0.5)
        if cap := self.options.get("softcap"):
            s = cap * torch.tanh(s / cap)
        if bias := self.options.get("bias"):
            n = torch.arange(s.shape[2]), torch.arange(s.shape[3])
            s = s + bias.bind(Shape(*s.shape), s.device).at(*n)
        seen = torch.ones(s.shape, dtype=torch.bool)
        if self.mask is not None:
            seen = self.mask.dense(*s.shape[2:]).expand(s.shape)
        some = seen.any(-1)
        far = torch.where(seen, s, -math.inf)
        sink = self.options.get("sink")
        if sink is not None:
            column = sink.view(-1, 1, 1).expand(*s.shape[:3], 1)
            lse = torch.cat([far, column], -1).logsumexp(-1)
        else:
            lse = torch.where(some[..., None], far, 0.0).logsumexp(-1)
            lse = torch.where(some, lse, -math.inf)
        ok = lse > -math.inf
        away = torch.where(seen, s - torch.where(ok, lse, 0.0)[..., None], 0.0)
        p = torch.where(seen, away.exp(), 0.0)
        entropy = -(p * away).sum(-1)
        if sink is not None:
            left = sink.view(-1, 1) - lse
            entropy = entropy - left.exp() * left
        count = seen.sum(-1).clamp_min(1)
        mean = torch.where(seen, s, 0.0).sum(-1) / count
        largest = torch.where(some[..., None], far, 0.0).amax(-1)
        region = p[:, :, slice(*REGION[0]), slice(*REGION[1])]
        top = p.topk(3, -1).values
        away = torch.where(seen, s - mean[..., None], 0.0)
        kept = BLOCKS.repeat_interleave(BLOCK[0], 1).repeat_interleave(BLOCK[1], 2)
        kept = (p * kept[:, : s.shape[2], : s.shape[3]]).sum(-1)
        looks = p.sum(-1) > 0
        recall = torch.where(looks, kept / torch.where(looks, p.sum(-1), 1.0), 1.0)
        target = by_block(p.sum(1))
        return {
            "out": p @ v,
            "lse": lse,
            "entropy": entropy,
            "max_logit": torch.where(some, largest, -math.inf),
            "mean_logit": torch.where(some, mean, -math.inf),
            "mass": p[..., KEYS].sum(-1),
            "std_logit": (away.square().sum(-1) / count).sqrt(),
            "min_logit": torch.where(seen, s, math.inf).amin(-1),
            "recall": recall,
            "mean recall": torch.where(
                looks.any(-1), (recall * looks).sum(-1) / looks.sum(-1).clamp_min(1), 1.0
            ),
            "target": target,
            "target of some": target[:, slice(*REGION[0])],
            "top": top,
            "received": p.sum(-2),
            "weights": p[:, HEADS][:, :, QUERIES][..., KEYS],
            "map": pooled(p, MAP, "mean"),
            "map sum": pooled(region, MAP, "sum"),
            "map max": pooled(region, MAP, "max"),
        }


def by_block(p: Tensor) -> Tensor:
    """Shares of 1 for each block of keys."""
    blocks = torch.stack([part.sum(-1) for part in p.split(BLOCK[1], -1)], -1)
    total = blocks.sum(-1, keepdim=True)
    return blocks / torch.where(total > 0, total, 1.0)


def pooled(p: Tensor, cells: tuple[int, int], pool: str) -> Tensor:
    rows, columns = (
        [[i for i in range(n) if i * c // n == cell] for cell in range(c)]
        for n, c in zip(p.shape[2:], cells, strict=True)
    )
    kinds = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}
    cell = [[kinds[pool](p[:, :, r][..., c], (2, 3)) for c in columns] for r in rows]
    return torch.stack([torch.stack(row, -1) for row in cell], 2)
