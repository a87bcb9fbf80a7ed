"""Tests mirror src; parity holds every backend to the formula, laws state properties."""

from tests import shapes as shapes
