"""Vocabularies and texts small enough to train on in seconds."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from models.train.vocabulary import train
from regard.models import Tokenizer

TEXTS = [
    "The cat sat on the mat. The dog sat on the cat, and the cat ran to the mat.",
    'A king had a daughter; the daughter had a cat. "Where is the cat?" said the king.',
    "Don't be afraid, for I'm with you always: it was 1611, and all was well.",
] * 4


@cache
def tokenizer_file() -> Path:
    path = Path(tempfile.mkdtemp()) / "tokenizer.json"
    train(TEXTS, 320, path)
    return path


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.read(tokenizer_file())
