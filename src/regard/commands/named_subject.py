"""What the words of a command name: a text that is read now, or a file of what was seen before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from regard import models
from regard.errors import RegardError
from regard.models.named_models import EMBEDDED
from regard.seen import Seen
from regard.trace_files import load
from regard.view.atlas import read
from regard.view.subjects import (
    SENTENCE,
    SPELLING,
    Spelling,
    Subject,
    Tell,
    no_word,
    run,
    spelled,
)

STORY = (
    "Once upon a time there was a girl named Lily. Lily had a red ball. One day Tom took the red "
    "ball. Lily was sad. Tom gave the red"
)
"""The example for a model that learned from stories: its names and things come again."""
SMALL = "regard-small"
FEW = 200
"""Texts of more words are too long for the small model."""


def subject_of(
    text: list[str] | None,
    model: str | None = None,
    how: Spelling | None = None,
    tell: Tell = lambda doing, done, total: None,
) -> Subject:
    """What is meant by the words of a command: the example if there are none.

    >>> subject_of(["to", "be"], "spelling").title
    '2 words compared by their spelling; no trained model'
    """
    source, how = _source(text), how or Spelling()
    if isinstance(source, Path):
        _refuse("a trace file", how, ["--model"] if model is not None else [])
        return _recorded(source)
    reads = default_model(source or "", how) if model is None else model
    if reads == SPELLING:
        return spelled(SENTENCE if source is None else source, how, example=source is None)
    _refuse(f"--model {reads}", how)
    return _read(STORY if source is None else source, reads, tell)


def default_model(text: str, how: Spelling) -> str:
    """The model when none is named: the small one of this package, if it is there and the text is
    short; and comparison by spelling where an option of that comparison is given."""
    there = (EMBEDDED / SMALL / "model.safetensors").exists()
    return SMALL if there and how == Spelling() and len(text.split()) <= FEW else SPELLING


def text_of(name: str) -> str:
    """The text of a file, or of standard input for -."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RegardError(
            "the text cannot be read",
            got=f"{name}: {error}",
            accepted="a file of UTF-8 text, or - for standard input",
        ) from None


def _source(text: list[str] | None) -> str | Path | None:
    """The text that is meant, or the trace file; None where neither was named."""
    if not text:
        return None
    if text == ["-"]:
        return text_of("-")
    if len(text) == 1 and "\n" not in text[0]:
        path = Path(text[0])
        if _is(Path.is_file, path):
            return path if _holds_traces(path) else text_of(text[0])
        if text[0] and _is(Path.is_dir, path):
            raise RegardError(
                "that is a folder, not a text",
                got=repr(text[0]),
                accepted="a trace file, a text file, or a text",
                do="name a file in it; as a text of one word it can come from standard input (-)",
            )
        if path.suffix in (".regard", ".safetensors", ".txt", ".md") and " " not in text[0]:
            raise RegardError(
                "there is no such file", got=repr(text[0]), accepted="a trace file or a text file"
            )
    return " ".join(text)


def _is(kind: Callable[[Path], bool], path: Path) -> bool:
    try:
        return kind(path)
    except (OSError, ValueError):  # too long for a name, or characters that none can have
        return False


def _holds_traces(path: Path) -> bool:
    """Whether a file says, by its name or its first bytes, that it is no text."""
    try:
        with path.open("rb") as file:
            start = file.read(10)
    except OSError:
        start = b""  # Whoever reads the whole says why it cannot be read.
    return path.suffix in (".regard", ".safetensors") or start[8:10] == b'{"'


def _refuse(what: str, how: Spelling, wrong: list[str] | None = None) -> None:
    """Refuse what only words compared by their spelling can be asked."""
    changed = [f.name for f in fields(how) if getattr(how, f.name) != f.default]
    wrong = [*(wrong or []), *(f"--{name}" for name in changed)]
    if wrong:
        raise RegardError(
            f"{what} has its own attention, which is not recomputed",
            got=", ".join(wrong),
            accepted="--layer, --head, --token, --call and how to show them",
        )


def _recorded(path: Path) -> Subject:
    seen = load(path)
    return _subject(seen, f"{seen.model or 'a model'} read", f"recorded in {path}")


def _read(text: str, model: str, tell: Tell) -> Subject:
    if not text.strip():
        raise no_word(text)
    reader = models.load(model, progress=tell)
    found = run(reader, text, 0, tell)
    subject = _subject(found.seen, f"{model} reads", repr(reader))
    told = found.told(reader, text)
    return replace(subject, told=told, names=found.names, reader=reader)


def _subject(seen: Seen, says: str, about: str) -> Subject:
    tokens = read(seen)
    many = f"{len(tokens)} tokens" if tokens else "a text"
    heads = {layer.heads for layer in seen.values()}
    shape = f"{len(seen)} layers of {'/'.join(map(str, sorted(heads)))} heads"
    return Subject(seen, None, f"{says} {many}: {shape}", about)
