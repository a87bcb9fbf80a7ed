"""What kinds of GPUs have: the memory of a program, the copy engine, how many multiprocessors."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from regard.backends.triton.arguments import capability, stands_for


class Card(NamedTuple):
    """What settings are chosen by."""

    generation: int
    """The major compute capability."""
    shared: int
    """Bytes of shared memory that one program can have."""
    processors: int

    @property
    def copies(self) -> bool:
        """Whether a copy engine (TMA) reads tiles."""
        return self.generation >= 9

    @property
    def measured(self) -> bool:
        """Whether settings were measured on such a card, so that all of them fit."""
        return self.generation == 9

    @property
    def multiplies_memory(self) -> bool:
        """Whether products read tiles from shared memory, and not from registers."""
        return self.generation in (9, 10, 11)

    @property
    def tensor_memory(self) -> bool:
        """Whether products are kept in a memory of their own, which is small."""
        return self.generation in (10, 11)


HOPPER = Card(9, 232_448, 132)
CARDS = {
    80: Card(8, 166_912, 108),  # A100
    86: Card(8, 101_376, 84),  # A40, RTX 30
    89: Card(8, 101_376, 58),  # L4, RTX 40
    90: HOPPER,  # H100, H200
    100: Card(10, 232_448, 148),  # B200
    120: Card(12, 101_376, 170),  # RTX 50
}
"""By compute capability, for kernels that are compiled for a GPU that is not there. For one that is
there, PyTorch reports them."""


def card_of(device: torch.device) -> Card:
    """The GPU that holds tensors, or that `meta` tensors stand for. Where kernels are interpreted
    they run as on Hopper, but there is nothing to share work between."""
    if device.type == "meta":
        return standing_for(stands_for.get())
    return _found(device)


def standing_for(wanted: int) -> Card:
    """A kind of GPU by its compute capability. One that is not in the table is given what all have;
    without one, Hopper."""
    if not wanted:
        return HOPPER
    least = min(card.shared for card in CARDS.values())
    return CARDS.get(wanted, Card(wanted // 10, least, HOPPER.processors))


@cache
def _found(device: torch.device) -> Card:
    if device.type != "cuda":
        return HOPPER._replace(processors=1)
    properties = torch.cuda.get_device_properties(device)
    # Older versions of PyTorch do not report it.
    shared = getattr(properties, "shared_memory_per_block_optin", None)
    known = standing_for(capability(device))
    return Card(
        known.generation, int(shared or known.shared), int(properties.multi_processor_count)
    )
