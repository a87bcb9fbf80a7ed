"""A training loop with accelerate, monitored on all ranks, with QK-clip.

    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py

The monitor looks at the model inside of what accelerate wraps around it, so that layers keep their
names, and steps where the optimiser does: not while gradients are accumulated.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from regard.monitoring import Report


def train(batches: int = 8, qk_clip: float = 0.01) -> tuple[LlamaForCausalLM, list[Report]]:
    """Train a small model; gives it, and the reports, which are those of all ranks."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    given = LlamaForCausalLM(config)
    texts = TensorDataset(torch.randint(32, (2 * batches * accelerator.num_processes, 12)))
    model, optimiser, loader = accelerator.prepare(
        given, torch.optim.AdamW(given.parameters(), lr=1e-2), DataLoader(texts, batch_size=2)
    )
    reports = []
    bare = accelerator.unwrap_model(model)
    with regard.Monitor(bare, every=2, qk_clip=qk_clip, rules=(), on_error="raise") as monitor:
        for (words,) in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=words, labels=words).loss
                accelerator.backward(loss)
                optimiser.step()
                optimiser.zero_grad()
            if accelerator.sync_gradients:
                report = monitor.step()
                if report is not None:
                    reports.append(report)
    return bare, reports


if __name__ == "__main__":
    for report in train()[1]:
        if Accelerator().is_main_process:
            print(report)
