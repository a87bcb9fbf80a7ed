"""What is looked at: words compared by their spelling, texts that models read, parts of them."""

from regard.view.subjects.model_runs import (
    SPELLING,
    Tell,
    TextInfo,
    check_words,
    known_badges,
    known_heads,
    run,
)
from regard.view.subjects.spelled_words import SENTENCE, TOKEN, Spelling, no_word, spelled
from regard.view.subjects.subject import Subject
from regard.view.subjects.view_options import (
    Look,
    ViewOptions,
    chosen_head,
    look,
    placed,
    refuse_parts,
    two_texts,
)
from regard.view.subjects.word_vectors import vectors, words

__all__ = [
    "SENTENCE",
    "SPELLING",
    "TOKEN",
    "Look",
    "Spelling",
    "Subject",
    "Tell",
    "TextInfo",
    "ViewOptions",
    "check_words",
    "chosen_head",
    "known_badges",
    "known_heads",
    "look",
    "no_word",
    "placed",
    "refuse_parts",
    "run",
    "spelled",
    "two_texts",
    "vectors",
    "words",
]
