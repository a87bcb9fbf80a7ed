"""Hugging Face models from a folder or by name: safetensors weights only, and no code but
transformers' own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.utils import logging

from regard.cancellation import UnwantedError
from regard.errors import RegardError
from regard.files import expanded, is_folder, is_there
from regard.models.devices import chosen_device, chosen_dtype
from regard.models.download_bar import Tell, download_bar
from regard.models.staged_folder import CONFIG, INDEX, WEIGHTS, WORDS, configuration, shards, staged


class Loaded(NamedTuple):
    """A model ready to read, and what makes ids of text."""

    model: nn.Module
    tokenizer: Any
    longest: int | None
    """How many tokens the model has positions for; None if it does not say."""


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    gguf: str | None = None,
    tell: Tell | None = None,
) -> Loaded:
    """A model of transformers and its tokenizer, from a folder or by its name on the hub.

    Weights are read from safetensors files only, or from the one `gguf` file named; code that comes
    with a model is never run.
    `dtype="auto"` is float32 on a CPU and the type of the file elsewhere; `device="auto"` is CUDA
    where there is one. `tell` is told what is being done, how much of it is, and of how much.
    """
    where, kind = chosen_device(device), _type(dtype, chosen_device(device))
    how: dict[str, Any] = {"trust_remote_code": False}
    with ExitStack() as opened, _quiet(), _explained(name) as as_named:
        source, numbers = _place(name, tell), None
        if gguf is not None:
            how["gguf_file"] = gguf
        else:
            _refuse_foreign(source)
            folder = source
            source, numbers = opened.enter_context(staged(folder))
            as_named[str(source)] = str(folder)
        config = transformers.AutoConfig.from_pretrained(source, **how)
        if getattr(config, "is_encoder_decoder", False):
            raise RegardError(
                "a model that reads one text and writes another cannot be recorded by one text",
                got=f"{name!r} ({config.model_type})",
                accepted="decoders and encoders",
                do="run it under regard.watch, and save what was seen",
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **how)
        auto = _auto(config, gguf)
        if numbers is not None:
            _refuse_size(name, auto, config, numbers)
        if tell is not None:
            tell(f"reading {_counted(numbers)}weights", 0, 0)
        model, info = auto.from_pretrained(
            source,
            config=config,
            dtype=kind,
            use_safetensors=None if gguf else True,
            output_loading_info=True,
            **how,
        )
        _refuse_gaps(name, info)
        longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        if tell is not None and where.type != "cpu":
            tell(f"moving to {where}", 0, 0)
        ready = model.eval().to(where)
    return Loaded(ready, tokenizer, longest if type(longest) is int else None)


def _counted(numbers: int | None) -> str:
    return "" if numbers is None else f"{numbers / 1e6:,.0f} million "


def _place(name: str, tell: Tell | None) -> Path:
    """The folder of a model: the one that is named, or what was fetched of it from the hub."""
    folder = expanded(name)
    if is_folder(folder):
        return folder
    if not _could_be_a_name(name) or is_there(folder):
        raise RegardError(
            "there is no such model",
            got=repr(name),
            accepted="a folder with config.json, model.safetensors and a tokenizer, or a name on "
            "the Hugging Face hub such as owner/name",
        )
    return _fetched(name, tell)


def _fetched(name: str, tell: Tell | None) -> Path:
    """What is read of a model on the hub, and nothing else of it."""
    from huggingface_hub import snapshot_download

    words, bar = [f"*{ending}" for ending in WORDS], download_bar(tell)
    patterns = [*words, WEIGHTS]
    found = snapshot_download(name, allow_patterns=patterns, ignore_patterns="*/*", tqdm_class=bar)
    folder = Path(found)
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        # The same state of the model, whatever was uploaded since.
        wanted = shards(folder / INDEX)
        snapshot_download(name, revision=folder.name, allow_patterns=wanted, tqdm_class=bar)
    return folder


def _auto(config: Any, gguf: str | None) -> Any:
    """Models that generate text are loaded with their language-model head, others without."""
    if gguf is not None:
        # GGUF files hold models that generate text, and do not say so.
        return transformers.AutoModelForCausalLM
    writes = ("ForCausalLM", "LMHeadModel")
    kinds = getattr(config, "architectures", None) or []
    if any(kind.endswith(writes) for kind in kinds):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def _refuse_foreign(folder: Path) -> None:
    """Code that comes with a model is not run."""
    if not (folder / CONFIG).exists():
        return
    about = configuration(folder)
    known = about.get("model_type") in (*transformers.CONFIG_MAPPING,)
    if "auto_map" in about and not known:
        raise RegardError(
            "the model comes with its own code, which is not run",
            got=f"{folder}: auto_map in config.json",
            accepted="models that transformers knows by itself",
            do="load it yourself if you trust its code, and run it under regard.watch",
        )


def _refuse_size(name: str, auto: Any, config: Any, numbers: int) -> None:
    """transformers would fill parameters that are not in the files with random numbers, however
    many a configuration asks for."""
    with torch.device("meta"):
        asked = sum(p.numel() for p in auto.from_config(copy.deepcopy(config)).parameters())
    # Quantized weights are packed, several to a number.
    if asked > 16 * numbers + 1_000_000:
        raise RegardError(
            "config.json asks for more than the weights hold",
            got=f"{name!r}: {asked} parameters, and {numbers} numbers in the files",
            do="get the files again",
        )


def _refuse_gaps(name: str, info: Any) -> None:
    """transformers would fill weights that are not in the files with random numbers."""
    # Poolers come after all attention, and many files leave them out.
    missing = sorted(key for key in info["missing_keys"] if "pooler" not in key)
    if missing:
        raise RegardError(
            "some weights of the model are missing",
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
    usual = torch.float32 if device.type == "cpu" else "auto"
    return chosen_dtype(dtype) or usual


@contextmanager
def _explained(name: str) -> Iterator[dict[str, str]]:
    """Errors of transformers as a RegardError. The table that it gives says which temporary folders
    are called by other names there."""
    as_named: dict[str, str] = {}
    try:
        yield as_named
    except (RegardError, UnwantedError):
        raise
    # A malformed folder makes transformers raise any kind of exception.
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        for made, named in as_named.items():
            first = first.replace(made, named)
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__} "
        raise RegardError(
            "the model cannot be loaded",
            got=f"{name!r}: {kind}{first}".rstrip(": "),
            accepted="a folder with config.json, model.safetensors and a tokenizer, or the name of "
            "such a model on the Hugging Face hub, if that can be reached",
            do="where there is no network, fetch it elsewhere (hf download NAME --local-dir FOLDER)"
            " and give the folder",
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log lines and progress bars of transformers."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
