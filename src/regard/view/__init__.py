"""Traces made visible."""

from regard.view.grid import head_grid
from regard.view.terminal import heat_map, shaded

__all__ = ["head_grid", "heat_map", "shaded"]
