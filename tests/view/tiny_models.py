"""Models small enough to read at once, and one that takes its time."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import torch

from regard.models import (
    CausalConfig,
    CausalModel,
    OwnReader,
    TranslatorConfig,
    TranslatorModel,
    load,
)
from regard.models.folder import save
from tests.models.tiny import tokenizer, tokenizer_file

CARD = {
    "heads": {
        "previous": [{"layer": 0, "head": 1, "score": 0.4}, {"layer": 1, "head": 1, "score": 0.3}],
        "first": [{"layer": 1, "head": 2, "score": 0.1}],
        "induction": [{"layer": 1, "head": 3, "score": 0.7}],
    }
}
"""What would be known of its heads, had it been trained."""


def causal(folder: Path) -> str:
    """A folder with a causal model of two layers, as `regard.models.load` takes it."""
    torch.manual_seed(0)
    sizes = CausalConfig(vocabulary=len(tokenizer()), d_model=32, layers=2, heads=4, longest=64)
    written = _written(CausalModel(sizes), folder)
    (folder / "card.json").write_text(json.dumps(CARD))
    return written


def translator(folder: Path) -> str:
    """A folder with an encoder–decoder of one layer each."""
    torch.manual_seed(0)
    sizes = TranslatorConfig(vocabulary=len(tokenizer()), d_model=32, layers=1, heads=4, longest=24)
    return _written(TranslatorModel(sizes), folder)


def slow(name: str, seconds: float = 0.05) -> OwnReader:
    """A model of which each part takes so long."""
    reader = load(name)
    assert isinstance(reader, OwnReader)
    for module in reader.model.modules():
        if not any(module.children()):
            module.register_forward_hook(lambda *_: time.sleep(seconds))
    return reader


def _written(model: CausalModel | TranslatorModel, folder: Path) -> str:
    save(model, folder)
    shutil.copy(tokenizer_file(), folder / "tokenizer.json")
    return str(folder)
