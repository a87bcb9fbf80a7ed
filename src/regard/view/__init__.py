"""Traces made visible."""

from regard.view.terminal import heat_map, shaded

__all__ = ["heat_map", "shaded"]
