"""`attn_implementation="regard"` is known to transformers, without importing it."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

MODULE = "transformers.modeling_utils"
"""Where the names of attention implementations are kept."""


def offer() -> None:
    """Register with transformers: now if it is imported, else as soon as it is."""
    if MODULE in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Waiting())


def imported_huggingface() -> Any:
    """What is known of Hugging Face models, if one may exist: regard does not import their
    library by itself."""
    if MODULE not in sys.modules:
        return None
    from regard.watching import huggingface

    return huggingface


class _Waiting(MetaPathFinder):
    """Finds nothing itself; it hears that a module is about to be imported."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        load = loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register()

        loader.exec_module = load_and_register
        return spec


def _register() -> None:
    try:
        from regard.watching import huggingface as huggingface
    except (ImportError, AttributeError):
        # Another version of transformers, with which `watch` says what it needs.
        return
