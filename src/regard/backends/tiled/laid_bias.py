"""A bias in memory, as the compiled loop reads it: float32 numbers, found by strides.

One that depends on distances alone takes one number for each of them: in such a row the next query
begins one place earlier.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.biases.alibi import Alibi
from regard.biases.dense import Dense
from regard.biases.relative import Relative
from regard.inputs import AttentionInputs

NO_BIAS = (0, 0, 0, 0, 0)
"""An address and four steps, where there is none."""
COPIED = 1 << 22
"""Numbers of another type that are made float32 for a call."""


class LaidBias(NamedTuple):
    numbers: Float[Tensor, "..."]
    start: int
    """Where the first query of the first head finds its first key."""
    steps: tuple[int, int, int, int]
    """From one batch entry, head, query and key to the next."""

    @classmethod
    def of(cls, x: AttentionInputs) -> LaidBias | None:
        """None where there is no bias, or `can_be_laid` says no."""
        if x.bias is None:
            return None
        _, _, Q, K = x.shape
        if isinstance(x.bias, Dense):
            t = x.bias.tensor.to(torch.float32)
            batch, head, query, key = (
                0 if n == 1 else step for n, step in zip(t.shape, t.stride(), strict=True)
            )
            return cls(t, 0, (batch, head, query, key))
        distances = torch.arange(1 - Q, K, device=x.q.device)
        row = x.bias.of_distances(distances)
        if row is None:
            return None
        row = row.to(torch.float32).contiguous()
        return cls(row, Q - 1, (0, 0 if len(row) == 1 else Q + K - 1, -1, 1))

    def fields(self, batch: int, head: int) -> dict[str, object]:
        """The fields of a call that begins at a batch entry and a head."""
        address = self.address(batch, head)
        return {"bias": address, "bias_steps": (ctypes.c_long * 4)(*self.steps)}

    def address(self, batch: int = 0, head: int = 0) -> int:
        at = self.start + batch * self.steps[0] + head * self.steps[1]
        return self.numbers.data_ptr() + at * self.numbers.element_size()


def can_be_laid(x: AttentionInputs) -> bool:
    """Whether the compiled loop can add the bias of a call. Not one that learns: its gradients are
    added up tile by tile, where large logits have to round as they did."""
    if x.bias is None:
        return True
    if any(t.requires_grad for t in x.bias.tensors()):
        return False
    if isinstance(x.bias, Dense):
        t = x.bias.tensor
        return t.dtype == torch.float32 or t.numel() <= COPIED
    return isinstance(x.bias, (Alibi, Relative))
