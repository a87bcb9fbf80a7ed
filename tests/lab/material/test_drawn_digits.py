"""Digits that a program draws."""

from __future__ import annotations

from regard.lab.apparatus.experiments import seeded
from regard.lab.material.drawn_digits import SIDE, draw


def test_every_digit_is_drawn_inside_the_picture() -> None:
    with seeded(0):
        pictures, digits = draw(300)
    assert digits.bincount(minlength=10).min() > 10
    assert pictures.shape == (300, SIDE, SIDE)
    assert float(pictures.min()) >= 0
    assert float(pictures.max()) <= 1
    # Ink is a small part of the paper, and hardly touches its edge.
    inked = (pictures > 0.5).float()
    assert 0.04 < float(inked.mean()) < 0.25
    assert float(inked[:, 0].mean()) < 0.02
