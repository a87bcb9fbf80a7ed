"""Hugging Face models from a folder or by name: safetensors weights only, and no code but
transformers' own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.utils import logging

from regard.errors import RegardError
from regard.models.devices import chosen_device

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Loaded(NamedTuple):
    """A model ready to read, and what makes ids of text."""

    model: nn.Module
    tokenizer: Any
    longest: int | None
    """How many tokens the model has positions for; None if it does not say."""


def load_model(
    name: str, *, dtype: str = "auto", device: str = "auto", gguf: str | None = None
) -> Loaded:
    """A model of transformers and its tokenizer, from a folder or by its name on the hub.

    Weights are read from safetensors files only, or from the one `gguf` file named; code that comes
    with a model is never run.
    `dtype="auto"` is float32 on a CPU and the type of the file elsewhere; `device="auto"` is CUDA
    where there is one.
    """
    where = chosen_device(device)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if gguf is None:
            _refuse_folder(folder)
    elif folder.exists() or not _could_be_a_name(name):
        raise RegardError(
            "there is no such model",
            got=repr(name),
            accepted="a folder with config.json, model.safetensors and a tokenizer, or a name on "
            "the Hugging Face hub such as owner/name",
        )
    source = str(folder) if folder.is_dir() else name
    kind = _type(dtype, where)
    with _quiet(), _explained(name):
        how: dict[str, Any] = {"trust_remote_code": False}
        if gguf is not None:
            how["gguf_file"] = gguf
        config = transformers.AutoConfig.from_pretrained(source, **how)
        if getattr(config, "is_encoder_decoder", False):
            raise RegardError(
                "a model that reads one text and writes another cannot be recorded by one text",
                got=f"{name!r} ({config.model_type})",
                accepted="decoders and encoders",
                do="run it under regard.watch, and save what was seen",
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **how)
        model, info = _auto(config, gguf).from_pretrained(
            source,
            config=config,
            dtype=kind,
            use_safetensors=None if gguf else True,
            output_loading_info=True,
            **how,
        )
    _refuse_gaps(name, info)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return Loaded(model.eval().to(where), tokenizer, longest)


def _auto(config: Any, gguf: str | None) -> Any:
    """Models that write come with their last layer, others without."""
    if gguf is not None:
        # The format holds models that write, and does not say so.
        return transformers.AutoModelForCausalLM
    writes = ("ForCausalLM", "LMHeadModel")
    kinds = getattr(config, "architectures", None) or []
    if any(kind.endswith(writes) for kind in kinds):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def _refuse_folder(folder: Path) -> None:
    """Say what a folder lacks, or holds that is not read."""
    there = {path.name for path in folder.iterdir()}
    if "config.json" not in there:
        raise RegardError(
            "the folder holds no model",
            got=f"{folder}, without config.json",
            accepted="a folder that save_pretrained wrote",
        )
    weights = [name for name in there if name.endswith(".safetensors")]
    pickled = sorted(name for name in there if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if not weights:
        raise RegardError(
            "the folder holds no safetensors weights",
            got=f"{folder}: {', '.join(pickled) or 'no weights at all'}",
            accepted="model.safetensors; pickled weights can run code when they are read",
            do="if you trust them, load them with transformers and write them again with "
            "model.save_pretrained(folder)",
        )
    try:
        about = json.loads((folder / "config.json").read_text())
        known = about.get("model_type") in transformers.CONFIG_MAPPING
        foreign = "auto_map" in about and not known
    except (ValueError, AttributeError) as error:
        raise RegardError(
            "config.json of the model cannot be read", got=f"{folder}: {error}"
        ) from None
    if foreign:
        raise RegardError(
            "the model comes with its own code, which is not run",
            got=f"{folder}: auto_map in config.json",
            accepted="models that transformers knows by itself",
            do="load it yourself if you trust its code, and run it under regard.watch",
        )


def _refuse_gaps(name: str, info: Any) -> None:
    """What is not in the files would be made up."""
    # Poolers come after all attention, and many files leave them out.
    missing = sorted(key for key in info["missing_keys"] if "pooler" not in key)
    if missing:
        raise RegardError(
            "the weights of the model are not all there",
            got=f"{name!r} without {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else ""),
            do="get the files again; transformers would fill in random numbers",
        )


def _could_be_a_name(name: str) -> bool:
    parts = name.split("/")
    plain = all(part and part.replace("-", "a").replace("_", "a").replace(".", "a").isalnum()
                for part in parts)  # fmt: skip
    return plain and len(parts) <= 2 and not name.startswith(".")


def _type(dtype: str, device: torch.device) -> torch.dtype | str:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise RegardError("unknown dtype", got=repr(dtype), accepted=", ".join(["auto", *DTYPES]))
    return DTYPES[dtype]


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except RegardError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise RegardError(
            "the model cannot be loaded",
            got=f"{name!r}: {first or type(error).__name__}",
            accepted="a folder with config.json, model.safetensors and a tokenizer, or the name of "
            "such a model on the Hugging Face hub, if that can be reached",
            do="where there is no network, fetch it elsewhere (hf download NAME --local-dir FOLDER)"
            " and give the folder",
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own notes and bars."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
