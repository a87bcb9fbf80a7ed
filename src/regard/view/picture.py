"""Traces as pictures, for papers and slides: every function gives a matplotlib Figure.

Colours differ in lightness first, so that any eye and any printer can tell them apart. `save`
writes PNG, SVG with its text as text, or PDF, with fonts inside; the same picture gives the same
bytes.
"""

from regard.view.pictures.arc_picture import arcs
from regard.view.pictures.theme import save
from regard.view.pictures.trace_pictures import entropy_by_layer, head_grid, heat_map
from regard.view.pictures.word_map_picture import word_maps

__all__ = ["arcs", "entropy_by_layer", "head_grid", "heat_map", "save", "word_maps"]
