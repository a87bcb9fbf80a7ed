"""Tests mirror src; parity holds every backend to the formula, laws state properties."""

from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    # The shape-checking hook asks for tests.shapes; without the hook its package is not needed.
    if name == "shapes":
        from importlib import import_module

        return import_module("tests.shapes")
    raise AttributeError(name)
