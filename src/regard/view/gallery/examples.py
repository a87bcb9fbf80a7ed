"""The examples: a text, who reads it, and a pair of tokens to look at."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlencode

from regard.errors import RegardError
from regard.view.gallery.long_text import counted
from regard.view.gallery.scene import COLOUR, GRID
from regard.view.subjects import SENTENCE, SPELLING

SMALL, KING_JAMES = "regard-small", "regard-king-james"
STORY = (
    "Once upon a time there was a girl named Lily. Lily had a red ball. One day Tom took the red "
    "ball. Lily was sad. Tom gave the "
)
DOG = "The little dog ran to the big tree and sat down."
QUEEN = 'The king said to the queen, "Come here." The queen said, "No." Then the king was sad.'


class Example(NamedTuple):
    """A text, and what to look at: how much one token gives to some others in one head."""

    name: str
    title: str
    says: str
    """One sentence, in which {share} stands for whole percent."""
    share: int
    text: str
    map: int
    head: int
    query: int
    keys: tuple[int, ...]
    """The tokens that get the share; the first of them is picked."""
    model: str = SMALL
    view: str = ""

    @property
    def address(self) -> str:
        """What is opened, as the end of the app's address tells it."""
        place: dict[str, object] = {"map": self.map, "head": self.head}
        if self.view:
            place["view"] = self.view
        if self.view == "picture":
            place["token"] = self.query
        else:
            place["picked"] = f"{self.query},{self.keys[0]}"
        return urlencode(place, safe=",")

    def told(self) -> dict[str, str]:
        """The example as the front end receives it."""
        return {
            "name": self.name,
            "title": self.title,
            "says": self.says.format(share=self.share).replace(" %", "\xa0%"),
            "model": self.model,
            "address": self.address,
        }


SUN = tuple(
    GRID * row + column for row in (1, 2, 3) for column in (8, 9, 10) if (row, column) != (2, 9)
)
LONG = counted()
SEVENTY = tuple(at for at, word in enumerate(LONG.split()) if word == "seventy")
EXAMPLES = (
    Example(
        "induction", "Going on as before",
        "The last ‘red’ looks at what followed ‘red’ before: ‘ball’, {share} %.",
        43, f"{STORY}red", 4, 5, 33, (24,),
    ),
    Example(
        "other-word", "One word differs",
        "The same story, but it ends in ‘big’, which was not there before: the same head gives the "
        "same ‘ball’ {share} %.",
        10, f"{STORY}big", 4, 5, 33, (24,),
    ),
    Example(
        "nonsense", "Going on without sense",
        "Four words over and over mean nothing, and the same head still finds what comes next: the "
        "last ‘amp’ of ‘lamp’ gives both ‘river’ together {share} %.",
        94, "zebra lamp river stone zebra lamp river stone zebra lamp", 4, 5, 21, (14, 6),
    ),
    Example(
        "sink", "A place to rest",
        "Where nothing comes twice the same head finds nothing to look for: ‘down’ leaves {share} "
        "% on the first token.",
        100, DOG, 4, 5, 11, (0,),
    ),
    Example(
        "duplicate", "The same word before",
        "The second ‘ball’ looks at the first, {share} %.",
        93, f"{STORY}red", 2, 0, 24, (16,),
    ),
    Example(
        "previous", "The word just before",
        "The last ‘king’ looks at the token just before it: ‘the’, {share} %.",
        94, QUEEN, 1, 5, 23, (22,),
    ),
    Example(
        "it", "What “it” is",
        "‘it’ looks at ‘animal’, {share} %. In general this head gives a token so far back 11 %: "
        "the rest is what it makes of the words.",
        47, "The animal didn't cross the street because it was too tired.", 1, 6, 9, (2,),
    ),
    Example(
        "name", "A name in pieces",
        "The model does not know ‘Goku’ and reads four pieces; ‘he’ gives them {share} % together. "
        "(So far back this head looks in general: 31 %.)",
        41, "Goku is the hero of the story because he never gives up.", 5, 2, 13, (3, 1, 2, 4),
    ),
    Example(
        "sentence-ends", "Where the last sentence ended",
        "The ‘een’ of the second ‘queen’ looks at the full stop and quotation mark that ended the "
        "sentence before, {share} %.",
        96, QUEEN, 6, 2, 15, (12,),
    ),
    Example(
        "said", "Who speaks next",
        "The second ‘said’ looks at the quotation mark after the first, {share} %: a quotation is "
        "what comes next.",
        96, QUEEN, 5, 7, 16, (9,),
    ),
    Example(
        "translation", "A translation, word by word",
        "The translator writes ‘thou’ and looks at ‘you’, {share} %: cross-attention lines two "
        "texts up.",
        100, "Don't be afraid, for you are with me.", 6, 0, 5, (6,), KING_JAMES,
    ),
    Example(
        "patches", "Patches of a picture",
        "No model: patches are compared by their colours. The middle of the sun gives the other "
        "patches of the sun {share} %.",
        67, "", 0, 0, 2 * GRID + 9, SUN, COLOUR, "picture",
    ),
    Example(
        "spelling", "Nothing learned",
        "No model: words are compared by their spelling. ‘reread’ gives ‘read’ {share} %.",
        66, SENTENCE, 0, 0, 13, (11,), SPELLING,
    ),
    Example(
        "long", "Ten thousand words",
        "All numbers from one to 1,860 in words, compared by their spelling: stripes come every "
        "ten, hundred and thousand. The first ‘seventy’ gives the 179 others {share} % together. "
        "(A hundred million pairs: it takes a while.)",
        54, LONG, 0, 0, SEVENTY[0], SEVENTY[1:], SPELLING, "map",
    ),
)  # fmt: skip


def example(name: object) -> Example:
    """An example by its name.

    >>> example("it").address
    'map=1&head=6&picked=9,2'
    """
    for each in EXAMPLES:
        if each.name == name:
            return each
    raise RegardError(
        "there is no such example",
        got=repr(name),
        accepted=", ".join(each.name for each in EXAMPLES),
    )
