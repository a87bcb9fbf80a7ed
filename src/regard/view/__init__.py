"""Traces made visible."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.view.app import App, serve
from regard.view.grid import head_grid
from regard.view.page import page
from regard.view.patches import Patches
from regard.view.terminal import heat_map, shaded
from regard.view.widget import widget

if TYPE_CHECKING:
    from regard.view import cost_plot as cost_plot
    from regard.view import lab_page as lab_page
    from regard.view import lab_picture as lab_picture
    from regard.view import picture as picture

__all__ = ["App", "Patches", "head_grid", "heat_map", "page", "serve", "shaded", "widget"]

# What draws with matplotlib, which is an extra and takes its time, is imported when asked for.
_LATER = ("cost_plot", "lab_page", "lab_picture", "picture")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return import_module(f"regard.view.{name}")
    raise AttributeError(f"module 'regard.view' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_LATER])
