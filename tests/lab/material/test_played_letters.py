"""Letters that are played as tones."""

from __future__ import annotations

import torch

from regard.lab.apparatus.experiments import seeded
from regard.lab.material.played_letters import BINS, WORD, play


def test_a_letter_sounds_at_its_own_pitch() -> None:
    with seeded(0):
        spectra, lengths, word, which = play(8)
    assert spectra.shape[2] == BINS
    for i in range(8):
        assert which[i].max() == WORD - 1
        assert int((which[i] >= 0).sum()) == int(lengths[i])
        power = spectra[i].expm1().square()
        height = (power * torch.arange(BINS)).sum(1) / power.sum(1)
        first, last = (height[which[i] == at].mean() for at in (0, WORD - 1))
        assert (first < last) == (word[i, 0] < word[i, -1])
