"""A model by its name, wherever it lies: in this package, in another, in a folder, on the hub."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, overload

import torch

from regard.arguments import described
from regard.errors import RegardError
from regard.files import expanded, is_folder
from regard.models import folder as own
from regard.models.card import Card
from regard.models.devices import chosen_device, chosen_dtype
from regard.models.download_bar import Tell
from regard.models.installed import MODELS, OWN
from regard.models.readers import HuggingFaceReader, OwnReader, OwnTranslator, Reader
from regard.models.translator import TranslatorModel

EMBEDDED = Path(__file__).parent / "embedded"
NAMES = {
    "regard-small": "a causal language model",
    "regard-king-james": "an encoder–decoder: newer English into that of the King James Bible",
}
"""The models of this repository: in this package, or in one beside it."""


def own_place(name: str) -> Path:
    """The folder of one of `NAMES`, or the reason why it is not there."""
    place = EMBEDDED / name
    if (place / "model.safetensors").exists():
        return place
    if name in OWN:
        return OWN[name].place(name)
    raise RegardError(
        f"the weights of {name!r} are not there",
        got=f"no {place / 'model.safetensors'}",
        do="make them from a clone of the repository, as docs/models.md says: "
        "python -m models.train.prepare, then sample, causal or translate, and heads",
    )


def own_names() -> dict[str, str]:
    """Those of `NAMES` that are there.

    >>> own_names()["regard-small"]
    'a causal language model'
    """
    found = {}
    for name, about in NAMES.items():
        with suppress(RegardError):
            own_place(name)
            found[name] = about
    return found


@overload
def load(
    name: Literal["regard-small"],
    *,
    dtype: str = ...,
    device: str = ...,
    progress: Tell | None = ...,
) -> OwnReader: ...
@overload
def load(
    name: Literal["regard-king-james"],
    *,
    dtype: str = ...,
    device: str = ...,
    progress: Tell | None = ...,
) -> OwnTranslator: ...
@overload
def load(
    name: str, *, dtype: str = ..., device: str = ..., progress: Tell | None = ...
) -> Reader: ...
def load(
    name: str, *, dtype: str = "auto", device: str = "auto", progress: Tell | None = None
) -> Reader:
    """A model and its tokenizer, ready to read.

    `name` is this package's own `regard-small`, one that lies in an installed package
    (`regard-king-james`, `smollm2`, `minilm`), a folder, or a name on the Hugging Face hub. Weights
    are never unpickled, and code that comes with a model is never run. `dtype` is "float32",
    "bfloat16", "float16" or "auto": float32 on a CPU and for models of this package. `progress` is
    called with what is being done (fetching, reading, …), how much is done, and the total: 0 if it
    is not known.
    """
    if not isinstance(name, str):
        raise RegardError(
            "a model is opened by its name",
            got=described(name),
            accepted=f"{', '.join(NAMES)}, the text of a folder's path, or a name on the hub",
        )
    where, kept = chosen_device(device), chosen_dtype(dtype)
    place = own_place(name) if name in NAMES else expanded(name)
    if own.is_own(place):
        model, tokenizer = own.read(place, where, kept or torch.float32)
        kind = OwnTranslator if isinstance(model, TranslatorModel) else OwnReader
        card = Card.read(place / "card.json")
        return kind(name, model, tokenizer, card, model.config.longest)
    gguf = None
    source = name
    if name in MODELS and not is_folder(place):
        source, gguf = str(MODELS[name].place(name)), MODELS[name].gguf or None
    if find_spec("transformers") is None:
        raise RegardError(
            "this model is loaded with transformers, which is not installed",
            got=repr(name),
            accepted=f"without it: {', '.join(NAMES)}",
            do="pip install 'regard[huggingface]'",
        )
    # Imported late: importing transformers takes seconds.
    if progress is not None:
        progress("importing transformers", 0, 0)
    from regard.models.huggingface_models import load_model

    loaded = load_model(source, dtype=dtype, device=device, gguf=gguf, tell=progress)
    return HuggingFaceReader(name, loaded.model, loaded.tokenizer, Card({}), loaded.longest)
