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
from regard.files import read_json
from regard.models.causal import CausalConfig, CausalModel
from regard.models.staged_folder import stored_shapes
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
        return read_json(folder / "config.json").get("model_type") in (*KINDS,)
    except (OSError, ValueError):
        return False


def read(
    folder: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Model, Tokenizer]:
    """The model, ready to read, and its tokenizer."""
    try:
        about = read_json(folder / "config.json")
        config, made = KINDS[about.pop("model_type")]
        path = folder / "model.safetensors"
        sizes = config(**about)
        model = _unfilled(sizes, stored_shapes(path), made).to_empty(device="cpu")
        model.load_state_dict(load_file(path))
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RegardError) and "cut short" in str(error):
            raise
        raise RegardError(
            "the weights of the model cannot be read",
            got=f"{folder}: {str(error).splitlines()[0]}",
            accepted="config.json and model.safetensors as models/train writes them",
        ) from None
    tokenizer = Tokenizer.read(folder / "tokenizer.json")
    if max(tokenizer.pieces, default=0) >= sizes.vocabulary:
        raise RegardError(
            "the tokenizer cannot be read",
            got=f"{folder}: {len(tokenizer)} tokens for a model of {sizes.vocabulary}",
            accepted="the tokenizer.json that the model was trained with",
        )
    ready: Model = model.eval().to(device, dtype)
    return ready, tokenizer


def _unfilled(config: Any, stored: dict[str, list[int]], made: type[Any]) -> Model:
    """The model, if its sizes are those of the weights; no numbers are drawn that these replace."""
    for name in ("vocabulary", "d_model", "layers", "heads", "longest"):
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r:.40} is not a whole number")
    if config.layers > len(stored):
        raise ValueError(f"layers={config.layers}, and {len(stored)} tensors")
    if type(config.dropout) not in (int, float) or not 0 <= config.dropout < 1:
        raise ValueError(f"dropout={config.dropout!r:.40} is no share")
    if config.d_model * config.vocabulary > 1 << 50:
        raise ValueError(f"too large: d_model={config.d_model}, vocabulary={config.vocabulary}")
    with torch.device("meta"):
        model: Model = made(config)
    asked = {name: list(t.shape) for name, t in model.state_dict().items()}
    odd = sorted(n for n in asked.keys() | stored.keys() if asked.get(n) != stored.get(n))
    if odd:
        name = odd[0]
        raise ValueError(f"{name} of shape {stored.get(name)}, for {asked.get(name)}")
    return model
