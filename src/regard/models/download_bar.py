"""Progress of a download from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

Tell = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and of how much: 0 if that is not known."""


def download_bar(tell: Tell | None) -> type[Any] | None:
    """A progress bar class for huggingface_hub that draws nothing and reports bytes to `tell`. None
    without `tell`: huggingface_hub then shows its own at a terminal."""
    if tell is None:
        return None
    # Imported late, as transformers is.
    drawn: type[Any] = import_module("huggingface_hub.utils.tqdm").tqdm
    most, told = 0, tell

    class Bar(drawn):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Others count files, of which one is nearly all.
            self._bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal most
            self.n += n or 0
            # Bytes that came and bytes that were written have a bar each: one is ahead.
            if self._bytes and self.n >= most:
                most = int(self.n)
                told("fetching", most, int(self.total or 0))

    return Bar
