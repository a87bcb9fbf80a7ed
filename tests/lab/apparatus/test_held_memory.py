"""How much memory a call holds."""

from __future__ import annotations

import torch

from regard.lab.apparatus.held_memory import peak


def test_the_peak_is_that_of_tensors_held_at_once() -> None:
    def call() -> None:
        for _ in range(3):
            torch.zeros(1 << 20)

    assert peak(call) == 4 << 20
