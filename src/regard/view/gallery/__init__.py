"""The gallery: texts and a picture in which a head shows what attention can do."""

from regard.view.gallery.examples import EXAMPLES, Example, example
from regard.view.gallery.opened_example import opened

__all__ = ["EXAMPLES", "Example", "example", "opened"]
