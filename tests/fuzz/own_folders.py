"""Folders of this package's own models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from regard import models
from regard.models.causal import CausalConfig, CausalModel
from regard.models.folder import save
from regard.models.tokenizer import BYTES, MARK_TEXT, PATTERN
from tests.fuzz.mutation import bytes_changed, json_changed
from tests.fuzz.targets import Target

TEXT = "a cat ate"


def written(folder: Path) -> None:
    """A model of two layers that knows bytes, and one word."""
    torch.manual_seed(0)
    pieces = [MARK_TEXT, *BYTES, "at", "cat"]
    save(CausalModel(CausalConfig(len(pieces), d_model=16, layers=2, heads=2, longest=32)), folder)
    tokenizer = {
        "model": {
            "vocab": {p: i for i, p in enumerate(pieces)},
            "merges": [["a", "t"], ["c", "at"]],
        },
        "pre_tokenizer": {"pretokenizers": [{"pattern": {"Regex": PATTERN}}]},
        "normalizer": None,
        "added_tokens": [],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "card.json").write_text(json.dumps({"licence": "Apache-2.0", "loss": {"a": 1.5}}))


def hostile(path: Path, draw: Random) -> None:
    """A file that is nearly what it was, or no file at all."""
    raw = path.read_bytes()
    match draw.randrange(10):
        case 0:
            path.unlink()
        case 1:
            path.unlink()
            os.mkfifo(path)
        case 2:
            path.unlink()
            path.symlink_to(draw.choice([path, path.parent, Path("/dev/zero")]))
        case n if n < 8 and path.suffix == ".json":
            path.write_text(json.dumps(json_changed(json.loads(raw), draw)))
        case _:
            path.write_bytes(bytes_changed(raw, draw))


def copied(whole: Path, folder: Path) -> list[Path]:
    made = []
    for path in whole.iterdir():
        made.append(folder / path.name)
        made[-1].write_bytes(path.read_bytes())
    return sorted(made)


def prepare(kept: Path) -> Callable[[Random, Path], str]:
    whole = kept / "whole"
    written(whole)
    names = set(models.load(str(whole), device="cpu").run(TEXT))

    def case(draw: Random, folder: Path) -> str:
        files = copied(whole, folder)
        for path in draw.sample(files, draw.randint(1, 2)):
            hostile(path, draw)
        reader = models.load(str(folder), device="cpu")
        seen = reader.run(TEXT)
        repr(reader), repr(reader.card), reader.read(TEXT), reader.generate("a", 2)
        return "read" if set(seen) == names else "read in part"

    return case


target = Target("own folders", prepare, share=2)
