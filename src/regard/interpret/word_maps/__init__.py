"""Maps of the words of a prompt over what is made of it. The folder is not named for its function,
`regard.interpret.grounding`: a module of that name would replace it."""

from regard.interpret.word_maps.counts import Counted, Span, Spot, counted
from regard.interpret.word_maps.grounded_run import GroundedRun, grounding
from regard.interpret.word_maps.maps import Grounding
from regard.interpret.word_maps.prompt_words import asked_number, words_of

__all__ = [
    "Counted",
    "GroundedRun",
    "Grounding",
    "Span",
    "Spot",
    "asked_number",
    "counted",
    "grounding",
    "words_of",
]
