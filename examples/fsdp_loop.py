"""A training loop in the manner of torchtitan, monitored on all ranks, with QK-clip.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_loop.py

Blocks are recomputed in the backward pass and sharded by FSDP2. The monitor is made on every rank,
after the model is sharded; the first one writes.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812

import regard
from regard.monitoring import Report

WORDS, WIDTH, HEADS, LAYERS = 32, 24, 3, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = (project(x) for project in (self.wq, self.wk, self.wv))
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.tok_embeddings(words)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x)


def train(steps: int = 6, qk_clip: float = 1.0) -> list[Report]:
    """Train on what this rank reads; gives the reports, which are those of all ranks."""
    torch.manual_seed(0)
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    model = Transformer()
    for name, block in list(model.layers.items()):
        model.layers[name] = fully_shard(checkpoint_wrapper(block), mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05)
    text = torch.Generator().manual_seed(rank)
    reports = []
    with regard.Monitor(model, every=3, qk_clip=qk_clip, rules=(), on_error="raise") as monitor:
        for _ in range(steps):
            words = torch.randint(WORDS, (4, 17), generator=text)
            predicted = model(words[:, :-1]).flatten(0, 1)
            F.cross_entropy(predicted, words[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            report = monitor.step()
            if report is not None:
                reports.append(report)
    return reports


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    for report in train():
        if distributed.get_rank() == 0:
            print(report)
    distributed.destroy_process_group()
