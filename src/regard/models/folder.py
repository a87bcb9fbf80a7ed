"""Embedded models as folders: config.json, model.safetensors, tokenizer.json and card.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from regard.errors import RegardError
from regard.models.causal import CausalConfig, CausalModel
from regard.models.tokenizer import Tokenizer
from regard.models.translator import TranslatorConfig, TranslatorModel

Model = CausalModel | TranslatorModel
KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "regard-causal": (CausalConfig, CausalModel),
    "regard-translator": (TranslatorConfig, TranslatorModel),
}


def save(model: Model, folder: Path) -> None:
    """Write sizes and weights, halved: float16 is what is shipped.

    >>> import tempfile
    >>> model = CausalModel(CausalConfig(vocabulary=50, d_model=16, layers=1, heads=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, Path(folder))
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['config.json', 'model.safetensors']
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = next(name for name, (_, made) in KINDS.items() if isinstance(model, made))
    about = {"model_type": kind, **asdict(model.config)}
    (folder / "config.json").write_text(json.dumps(about, indent=1) + "\n")
    weights = {name: w.detach().half().cpu().contiguous() for name, w in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def is_own(folder: Path) -> bool:
    """Whether a folder holds a model of this package."""
    try:
        return json.loads((folder / "config.json").read_text()).get("model_type") in KINDS
    except (OSError, ValueError, AttributeError):
        return False


def read(folder: Path, device: torch.device) -> tuple[Model, Tokenizer]:
    """The model, in float32 and ready to read, and its tokenizer."""
    about = json.loads((folder / "config.json").read_text())
    config, made = KINDS[about.pop("model_type")]
    try:
        model = made(config(**about))
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, TypeError, RuntimeError, SafetensorError) as error:
        raise RegardError(
            "the weights of the model cannot be read",
            got=f"{folder}: {str(error).splitlines()[0]}",
            accepted="config.json and model.safetensors as models/train writes them",
        ) from None
    tokenizer = Tokenizer.read(folder / "tokenizer.json")
    ready: Model = model.eval().to(device)
    return ready, tokenizer
