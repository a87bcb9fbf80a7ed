"""What the layers of a model remember between steps of generating."""

from __future__ import annotations

from regard.nn import Cache


class Memory:
    """One `nn.Cache` for each layer.

    `regard.watch` reads its length to recognise a call that continues a text.

    >>> memory = Memory(3)
    >>> memory.get_seq_length(), memory[2]
    (0, Cache(holds 0 of 0))
    """

    def __init__(self, layers: int) -> None:
        self._caches = [Cache() for _ in range(layers)]

    def __getitem__(self, layer: int) -> Cache:
        return self._caches[layer]

    def get_seq_length(self) -> int:
        """How many tokens were read so far, under the name transformers has for it."""
        return self._caches[0].position
