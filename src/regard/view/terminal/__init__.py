"""Traces drawn in the terminal."""

from regard.view.terminal.console import PlainConsole
from regard.view.terminal.head_grids import HeadGrid, head_grid
from regard.view.terminal.heat_maps import HeatMap, Shaded, heat_map, shaded, shading
from regard.view.terminal.text_view import show

__all__ = [
    "HeadGrid",
    "HeatMap",
    "PlainConsole",
    "Shaded",
    "head_grid",
    "heat_map",
    "shaded",
    "shading",
    "show",
]
