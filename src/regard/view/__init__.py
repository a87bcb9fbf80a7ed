"""Traces made visible."""

from regard.view.app import App, serve
from regard.view.grid import head_grid
from regard.view.page import page
from regard.view.patches import Patches
from regard.view.terminal import heat_map, shaded
from regard.view.widget import widget

__all__ = ["App", "Patches", "head_grid", "heat_map", "page", "serve", "shaded", "widget"]
