"""Words as vectors, by the path that they had: they are in `regard.view.subjects`."""

from regard.view.subjects import vectors, words

__all__ = ["vectors", "words"]
