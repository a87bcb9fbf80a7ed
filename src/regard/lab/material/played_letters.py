"""Letters played as chords, each for a time of its own: sounds that need no recording."""

from __future__ import annotations

import torch
from torch import Tensor

LETTERS, WORD, SHORTEST, LONGEST = "abcdefghij", 6, 3, 7
"""The letters, how many make a word, and how many frames each sounds."""
RATE, FRAME = 4000, 128
"""Samples a second, and in a frame."""
BINS = FRAME // 2 + 1
"""Numbers in the spectrum of a frame."""


def play(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Words of different letters as spectra of their sound [b t f] with their lengths [b], the
    letters [b n], and which letter sounds in each frame [b t] (-1 after the end).

    >>> spectra, lengths, word, which = play(2)
    >>> spectra.shape[2], word.shape, bool((which >= 0).sum(1).eq(lengths).all())
    (65, torch.Size([2, 6]), True)
    """
    word = torch.rand(count, len(LETTERS)).argsort(1)[:, :WORD]
    lasts = torch.randint(SHORTEST, LONGEST + 1, (count, WORD))
    lengths = lasts.sum(1)
    longest = int(lengths.max())
    which = torch.full((count, longest), -1)
    for row, each, length in zip(which, lasts, lengths.tolist(), strict=True):
        row[:length] = torch.arange(WORD).repeat_interleave(each)
    sounds = word.gather(1, which.clamp(min=0))
    pitch = 220.0 * 2 ** (sounds / 4)
    time = torch.arange(FRAME) / RATE
    wave = sum((2 * torch.pi * h * pitch[..., None] * time).sin() for h in (1.0, 1.5))
    wave = torch.where(which[..., None] >= 0, wave, 0.0) + 0.3 * torch.randn(*which.shape, FRAME)
    spectra = torch.fft.rfft(wave * torch.hann_window(FRAME)).abs().log1p()
    return spectra, lengths, word, which
