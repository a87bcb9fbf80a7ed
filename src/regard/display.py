"""How a value shows itself as the last line of a notebook's cell."""

from __future__ import annotations

from typing import Any


class Displayed:
    """A value that a notebook may ask to show itself. The view does it, and is not imported before.

    >>> import regard, torch
    >>> x = torch.randn(1, 2, 5, 4)
    >>> regard.trace(x, x, x)._repr_mimebundle_()["text/plain"]
    'Trace(batch 1, heads 2, queries 5, keys 5, width 4, float32 on cpu, by tiled)'
    """

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """What Jupyter, VS Code and Colab ask for."""
        from regard.view.notebook import bundle

        return bundle(self)

    def _display_(self) -> object:
        """What marimo asks for."""
        from regard.view.notebook import shown

        found = shown(self)
        return repr(self) if found is self else found
