"""A transformer as people write it themselves."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Block(nn.Module):
    """A layer as people write it themselves."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        parts = (project(y) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out_proj(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.between(x))
        return out


class Written(nn.Module):
    """GPT-2 small's shape by hand; on a CPU a smaller one."""

    def __init__(self, layers: int, width: int, heads: int, n: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1024, width), nn.Embedding(n, width)
        self.layers = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 1024, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        found: Tensor = self.out(self.norm(self.layers(x)))
        return found
