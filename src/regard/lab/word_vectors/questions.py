"""What vectors of words are asked."""

from __future__ import annotations

from dataclasses import dataclass

from regard.errors import RegardError
from regard.lab.word_vectors.vectors import Vectors

COUPLES = (("man", "woman"), ("king", "queen"), ("brother", "sister"), ("husband", "wife"))
KINDS = ("son", "daughter", "father", "mother", "silver", "gold", "brass", "sea", "river", "waters",
         "sword", "spear", "battle")  # fmt: skip
KIN = (("son", "daughter"), ("father", "mother"), ("brother", "sister"), ("king", "queen"),
       ("silver", "gold"), ("sword", "spear"), ("sheep", "oxen"), ("morning", "evening"),
       ("bread", "wine"), ("river", "sea"))  # fmt: skip
"""Words of a kind."""


@dataclass(frozen=True)
class Questions:
    """What vectors are asked, in the words of the texts that they come from."""

    analogies: tuple[tuple[str, str, str, str], ...]
    """a is to b as c is to the last."""
    senses: dict[str, dict[str, tuple[str, ...]]]
    """Sentences of a word, and words of the sense that each gives it."""

    def known(self, vectors: Vectors) -> Questions:
        """Those whose words all have vectors; the first of either kind cannot be left out."""

        def told(word: str) -> bool:
            return all(vectors.has(word, *sense) for sense in self.senses[word].values())

        first = next(iter(self.senses))
        needed = {*self.analogies[0], first, *KINDS}
        for words in (*COUPLES, *KIN, *self.senses[first].values()):
            needed |= set(words)
        lacking = sorted(word for word in needed if not vectors.has(word))
        if lacking:
            raise RegardError(
                "the vectors lack words that are asked for",
                got=f"{len(vectors.names):,} words without {', '.join(lacking[:8])}"
                + " and more" * (len(lacking) > 8),
                accepted="vectors of English in which everyday words are among the first",
            )
        return Questions(
            tuple(words for words in self.analogies if vectors.has(*words)),
            {word: said for word, said in self.senses.items() if told(word)},
        )


BIBLE = Questions(
    analogies=(
        ("man", "king", "woman", "queen"), ("man", "woman", "son", "daughter"),
        ("father", "mother", "son", "daughter"), ("father", "mother", "brother", "sister"),
        ("man", "woman", "husband", "wife"), ("he", "she", "his", "her"),
        ("man", "men", "woman", "women"), ("son", "sons", "daughter", "daughters"),
        ("day", "days", "year", "years"), ("hand", "hands", "foot", "feet"),
        ("eat", "bread", "drink", "wine"), ("egypt", "pharaoh", "babylon", "nebuchadnezzar"),
    ),
    senses={
        "bank": {"stood by the bank of the river": ("waters", "jordan", "sea"),
                 "give my money into the bank": ("silver", "shekels", "pieces")},
        "well": {"drew water from the well for the camels": ("flocks", "drink", "sheep"),
                 "do well that it may be good with thee": ("please", "pleased", "evil")},
        "bow": {"my bow and my sword and arrows": ("spear", "shield", "armour"),
                "bow down and serve them and worship": ("gods", "reverence", "worshipped")},
        "host": {"captain of the host of the army": ("battle", "horsemen", "joab"),
                 "the sun and the moon and all the host of heaven":
                     ("stars", "earth", "firmament")},
    },
)  # fmt: skip
TODAY = Questions(
    analogies=(
        ("man", "king", "woman", "queen"), ("france", "paris", "germany", "berlin"),
        ("japan", "tokyo", "italy", "rome"), ("good", "better", "bad", "worse"),
        ("big", "bigger", "small", "smaller"), ("walk", "walked", "go", "went"),
        ("he", "she", "his", "her"), ("uncle", "aunt", "brother", "sister"),
        ("car", "cars", "tree", "trees"), ("france", "french", "spain", "spanish"),
        ("eat", "bread", "drink", "wine"), ("doctor", "hospital", "teacher", "school"),
    ),
    senses={
        "bank": {"we walked along the bank of the river": ("water", "shore", "stream"),
                 "she put her money in the bank": ("loan", "credit", "savings")},
        "apple": {"he ate a sweet apple with bread and cheese": ("fruit", "juice", "pear"),
                  "apple makes a phone and a computer": ("microsoft", "software", "google")},
        "mouse": {"the cat chased a mouse and a rat": ("rodent", "animal", "rabbit"),
                  "click the mouse and type on the keyboard": ("computer", "screen", "software")},
        "bat": {"he swung the bat and hit the ball": ("baseball", "pitcher", "batting"),
                "a bat is a mammal that lives in a cave": ("species", "bird", "animal")},
    },
)  # fmt: skip
