"""Texts that say nothing but for one thing: random tokens, and the same again."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from regard.interpret.head_scores.texts.text_batches import Texts

PERIOD, SEQUENCES = 128, 8


def repeats(texts: Texts, longest: int | None, seed: int = 0) -> Int[Tensor, "b n"] | None:
    """Sequences of random tokens that are said twice, after the token that all texts begin with, if
    they do. None where a model is not called with one text of tokens.

    >>> said = repeats(Texts(torch.nn.Identity(), torch.tensor([[1, 2, 3, 4]])), None)
    >>> said.shape, bool((said[:, :2] == said[:, 2:]).all())
    (torch.Size([8, 4]), True)
    """
    sides = texts.sides[0]
    vocabulary = texts.vocabulary()
    if vocabulary is None or len(sides) != 1 or not isinstance(texts.calls[0], Tensor):
        return None
    most = max(side[0].places for side in texts.sides) if longest is None else longest
    start = texts.first
    period = min(PERIOD, (most - (start is not None)) // 2, len(vocabulary))
    if period < 2:
        return None
    draw = torch.Generator().manual_seed(seed)
    said = torch.stack(
        [
            vocabulary[torch.randperm(len(vocabulary), generator=draw)[:period]]
            for _ in range(SEQUENCES)
        ]
    )
    begins = [] if start is None else [torch.full((SEQUENCES, 1), start)]
    return torch.cat([*begins, said, said], 1).to(texts.calls[0])
