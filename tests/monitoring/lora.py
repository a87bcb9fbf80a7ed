"""A stand-in for the layers of PEFT that carry adapters: their structure, names and arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class DoraLinearVariant:
    """PEFT marks adapters that are more than LoRA by an object of such a class."""


class Magnitudes(nn.Module):
    def __init__(self, size: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(size)


class Linear(nn.Module):
    """W·x + b + Σ s·B·A·dropout(x), over the adapters in use."""

    def __init__(self, base_layer: nn.Module, frozen: bool = True) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(not frozen)
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.lora_dropout, self.lora_magnitude_vector = nn.ModuleDict(), nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.lora_variant: dict[str, Any] = {}
        self.active_adapters: list[str] = []
        self.merged_adapters: list[str] = []
        self.disable_adapters = False

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.base_layer.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.base_layer.bias
        return bias

    def add(
        self,
        name: str,
        scaling: float = 2.0,
        rank: int = 3,
        dropout: float = 0.0,
        bias: bool = False,
        dora: bool = False,
    ) -> Linear:
        flipped = type(self.base_layer).__name__ == "Conv1D"
        weight = self.base_layer.weight.T if flipped else self.base_layer.weight
        outputs, inputs = weight.shape
        self.lora_A[name] = nn.Linear(inputs, rank, bias=False)
        self.lora_B[name] = nn.Linear(rank, outputs, bias=bias)
        self.lora_dropout[name] = nn.Dropout(dropout) if dropout else nn.Identity()
        self.scaling[name] = scaling
        self.active_adapters.append(name)
        if dora:
            self.lora_variant[name] = DoraLinearVariant()
            self.lora_magnitude_vector[name] = Magnitudes(1.5 * weight.detach().norm(dim=1))
        return self

    def delta(self, name: str) -> Tensor:
        product: Tensor = self.lora_B[name].weight @ self.lora_A[name].weight
        return self.scaling[name] * product

    @torch.no_grad()
    def merge(self) -> None:
        for name in self.active_adapters:
            self.base_layer.weight += self.delta(name)
            self.merged_adapters.append(name)

    @torch.no_grad()
    def unmerge(self) -> None:
        while self.merged_adapters:
            self.base_layer.weight -= self.delta(self.merged_adapters.pop())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x)
        if self.disable_adapters or self.merged_adapters:
            return out
        for name in self.active_adapters:
            given = self.lora_dropout[name](x)
            added = self.lora_B[name](self.lora_A[name](given)) * self.scaling[name]
            if isinstance(self.lora_variant.get(name), DoraLinearVariant):
                norm = (self.base_layer.weight + self.delta(name)).norm(dim=1).detach()
                share = self.lora_magnitude_vector[name].weight / norm
                bare = given @ self.base_layer.weight.T
                out = out + (share - 1) * bare + share * added
            else:
                out = out + added
        return out
