"""Traces made visible."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.view.atlas import Patches
from regard.view.terminal import head_grid, heat_map, shaded
from regard.view.web import App, page, serve, widget

if TYPE_CHECKING:
    from regard.view import picture as picture
    from regard.view.pictures import cost_plot as cost_plot
    from regard.view.pictures import lab_page as lab_page
    from regard.view.pictures import lab_picture as lab_picture

__all__ = ["App", "Patches", "head_grid", "heat_map", "page", "serve", "shaded", "widget"]

# What draws with matplotlib, which is an extra and takes its time, is imported when asked for.
_LATER = {
    "cost_plot": "regard.view.pictures.cost_plot",
    "lab_page": "regard.view.pictures.lab_page",
    "lab_picture": "regard.view.pictures.lab_picture",
    "picture": "regard.view.picture",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return import_module(_LATER[name])
    raise AttributeError(f"module 'regard.view' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_LATER])
