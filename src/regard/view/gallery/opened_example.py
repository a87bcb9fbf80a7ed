"""An example of the gallery that a model has read: its maps, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable

from regard.cancellation import telling
from regard.models.readers import Reader
from regard.view.atlas import Atlas
from regard.view.gallery.examples import Example
from regard.view.gallery.scene import COLOUR, compared
from regard.view.subjects import SPELLING, Spelling, Tell, TextInfo, run, spelled


def opened(
    which: Example,
    reader: Callable[[str], Reader],
    tell: Tell = lambda doing, done, total: None,
) -> tuple[Atlas, TextInfo]:
    """The maps of an example. `reader` opens a model by its name, `tell` is told how far it is."""
    if which.model == COLOUR:
        return compared(), TextInfo(model=COLOUR)
    if which.model == SPELLING:
        with telling(lambda done, total: tell("comparing words", done, total)):
            return spelled(which.text, Spelling()).atlas(), TextInfo(which.text, SPELLING)
    model = reader(which.model)
    found = run(model, which.text, 0, tell)
    told = found.told(model, which.text)
    return found.atlas(which.model).know(told.badges), told
