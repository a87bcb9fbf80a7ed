"""The words of a prompt: which tokens each is made of, and how many of a thing are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from regard.errors import RegardError

NUMBERS = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8,
    "nine": 9, "ten": 10, "eleven": 11, "twelve": 12,
}  # fmt: skip
"""Number words. "a" and "an" ask for one too, but stand before much that is not counted."""
STARTS = (" ", "Ġ", "▁")
"""How tokenizers write the space before a word."""
END = "</w>"
"""How CLIP's writes the end of one."""
SPECIAL = ("<", "[")
"""What marks begin with that are no words: "<|endoftext|>", "</s>", "[PAD]"."""

Places = int | Sequence[int]


def words_of(tokens: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The words that tokens make, each with its places; one that comes again is numbered.

    Marks of the tokenizer (starts, ends, padding) and signs without a letter or digit are left out.
    Tokens that say neither where words begin nor where they end are a word each.

    >>> words_of(["<|startoftext|>", "three</w>", "oct", "opuses</w>", ".</w>", "<|endoftext|>"])
    {'three': (1,), 'octopuses': (2, 3)}
    >>> words_of(["▁a", "▁cat", "s", "▁and", "▁a", "</s>"])
    {'a': (0,), 'cats': (1, 2), 'and': (3,), 'a (2)': (4,)}
    """
    texts = [str(token) for token in tokens]
    by_end = any(text.endswith(END) for text in texts)
    by_start = not by_end and any(text.startswith(STARTS) for text in texts)
    spelled: list[tuple[str, list[int]]] = []
    open_word = False
    for place, text in enumerate(texts):
        bare = text.removesuffix(END).lstrip("".join(STARTS)) if text != END else text
        mark = text.startswith(SPECIAL) and text.endswith((">", "]"))
        if mark or not any(sign.isalnum() for sign in bare):
            open_word = False
            continue
        joins = open_word and (by_end or (by_start and not text.startswith(STARTS)))
        if joins:
            spelled[-1][1].append(place)
            spelled[-1] = (spelled[-1][0] + bare, spelled[-1][1])
        else:
            spelled.append((bare, [place]))
        open_word = not (by_end and text.endswith(END))
    found: dict[str, tuple[int, ...]] = {}
    for word, places in spelled:
        times = sum(name == word or name.startswith(f"{word} (") for name in found)
        found[f"{word} ({times + 1})" if times else word] = tuple(places)
    return found


def chosen_words(
    tokens: Sequence[str], words: Mapping[str, Places] | Sequence[str] | str | None
) -> dict[str, tuple[int, ...]]:
    """The words that maps are made of: all of a prompt's, some by name, or places by any name."""
    known = words_of(tokens)
    if words is None:
        if not known:
            raise RegardError(
                "the prompt has no words", got=repr(list(tokens)[:8]), do="say words= by place"
            )
        return known
    if isinstance(words, Mapping):
        given = {name: (at,) if isinstance(at, int) else tuple(at) for name, at in words.items()}
        wrong = {
            name: at
            for name, at in given.items()
            if not at or not all(0 <= place < len(tokens) for place in at)
        }
        if wrong or not given:
            raise RegardError(
                "words= says the places of each word among the tokens",
                got=repr(wrong or words),
                accepted=f"one or more places from 0 to {len(tokens) - 1} for each",
            )
        return given
    named = [words] if isinstance(words, str) else list(words)
    missing = [name for name in named if name not in known]
    if missing or not named:
        raise RegardError(
            "words= names words of the prompt",
            got=", ".join(map(repr, missing)) or "none",
            accepted=", ".join(map(repr, known)),
            do="or give their places: words={'name': [3, 4]}",
        )
    return {name: known[name] for name in named}


def asked_number(words: Sequence[str], noun: str) -> int | None:
    """How many of a thing the words of a prompt ask for: the number that stands before it, with no
    other noun that is counted, or number, in between; None if there is none.

    What lies between is taken to describe the thing, up to three words; "and" ends it.

    >>> asked_number("three red circles and 2 squares".split(), "circles")
    3
    >>> asked_number("three red circles and 2 squares".split(), "squares")
    2
    >>> asked_number("three red circles and squares".split(), "squares")
    """
    plain = [word.split(" (")[0].lower() for word in words]
    place = list(words).index(noun)
    for before in reversed(plain[max(0, place - 4) : place]):
        if before in NUMBERS:
            return NUMBERS[before]
        if before.isdecimal():
            return int(before)
        if before in ("and", "or", "with", "of", "on", "in"):
            return None
    return None
