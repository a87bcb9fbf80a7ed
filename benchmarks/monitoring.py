"""What monitoring costs a step of training on a CPU: forward, backward and optimiser.

python benchmarks/monitoring.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measuring import interleaved, write
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard

WIDTH, HEADS, LAYERS = 256, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        parts = (project(y) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out_proj(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.between(x))
        return out


def step(x: Tensor, look: int | None = None, clip: float | None = None) -> Callable[[], None]:
    """A step of training a model of its own, monitored or not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4)
    monitor = None
    if look is not None:
        monitor = regard.Monitor(model, every=10, look=look, qk_clip=clip, rules=())

    def run() -> None:
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()
        if monitor is not None:
            monitor.step()

    return run


def main() -> None:
    rows: list[dict[str, Any]] = []
    for n in (512, 2048):
        x = torch.randn(1, n, WIDTH, generator=torch.Generator().manual_seed(0))
        seconds = interleaved(
            {
                "plain": step(x),
                "plain again": step(x),
                "looked at": step(x, look=1),
                "looked at, clipped": step(x, look=1, clip=100.0),
            },
            15 if n < 2048 else 9,
        )
        share = seconds["looked at"] / seconds["plain"]
        rows.append(
            {
                "tokens": n,
                "plain step ms": seconds["plain"] * 1e3,
                # How far two measurements of one and the same thing are apart.
                "plain again / plain": seconds["plain again"] / seconds["plain"],
                "step looked at / plain": share,
                "the same with QK-clip / plain": seconds["looked at, clipped"] / seconds["plain"],
                "by default (every tenth) / plain": 1 + (share - 1) / 10,
            }
        )
    about = {"model": f"{LAYERS} layers, {HEADS} heads, width {WIDTH}, causal, float32"}
    write("monitoring", {"A step of training": rows}, about)


if __name__ == "__main__":
    main()
