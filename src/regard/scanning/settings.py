"""What decides the numbers of a scan, and a folder that holds one scan only."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.files import read_json, replacing
from regard.interpret.head_scores.texts.text_batches import TOKENS
from regard.models.causal import CausalConfig
from regard.models.readers import HuggingFaceReader, OwnReader, Reader
from regard.scanning.corpus import Corpus, usual_shards
from regard.scanning.options import Options
from regard.scanning.scales import BINS
from regard.version import __version__

FORMAT = 1
MANIFEST = "manifest.json"
PIECE = 1 << 26
NOT_TOLD = ("_name_or_path", "transformers_version")
"""Parts of a configuration that change nothing, or are told by themselves."""


@dataclass(frozen=True)
class Settings:
    """By name: whatever changes the numbers if it changes."""

    values: Mapping[str, Any]

    @staticmethod
    def of(reader: Reader, corpus: Corpus, options: Options, threads: int) -> Settings:
        first = next(reader.model.parameters())
        return Settings(
            {
                "format": FORMAT,
                "model": type(reader.model).__name__,
                "weights": weights_hash(reader.model),
                "configuration": configuration_hash(reader.model),
                "tokenizer": tokenizer_hash(reader),
                "texts": corpus.hash,
                "number of texts": len(corpus),
                "shards": options.shards or usual_shards(len(corpus)),
                "observe": list(options.observe),
                "layers": list(options.layers),
                "tokens of a text": options.max_tokens or reader.longest,
                "tokens at once": TOKENS,
                "bins": BINS,
                "dtype": str(first.dtype).removeprefix("torch."),
                "device": first.device.type,
                "threads": threads if first.device.type == "cpu" else None,
                "regard": __version__,
                "torch": torch.__version__,
                **_library(reader),
            }
        )

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()

    @property
    def shards(self) -> int:
        found: int = self.values["shards"]
        return found


def settle(folder: Path, settings: Settings) -> None:
    """Make the folder that of these settings, or refuse: it holds a scan of others."""
    path = folder / MANIFEST
    there = manifest(folder)
    if there is None:
        try:
            (folder / "shards").mkdir(parents=True, exist_ok=True)
            foreign = [
                entry.name
                for entry in folder.iterdir()
                if entry.name != "shards" and entry.suffix != ".part"
            ]
        except OSError as error:
            raise RegardError(
                "the folder cannot be written to", got=f"{folder}: {error.strerror or error}"
            ) from None
        if foreign:
            raise RegardError(
                "the folder holds something else than a scan",
                got=f"{folder}: {', '.join(sorted(foreign)[:3])}",
                accepted="a folder that is new or empty, or holds the beginning of the same scan",
                do="choose another folder",
            )
        with replacing(path) as unfinished:
            unfinished.write_text(json.dumps(settings.values, indent=1) + "\n", encoding="utf-8")
        return
    names = [*there, *(name for name in settings.values if name not in there)]
    odd = [n for n in names if there.get(n) != settings.values.get(n)]
    if odd:
        differs = "; ".join(
            f"{n}: {_short(there.get(n))} there, {_short(settings.values.get(n))} now" for n in odd
        )
        raise RegardError(
            "the folder holds a scan of other settings, and the two cannot be mixed",
            got=f"{folder}: {differs}",
            accepted="the same settings: then what is there is kept, and the rest is read",
            do="choose another folder, or remove that one",
        )


def manifest(folder: Path) -> dict[str, Any] | None:
    """The settings that a folder holds a scan of; None if it holds none."""
    path = folder / MANIFEST
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise RegardError("a scan is a folder", got=f"{folder} is a file") from None
    except (OSError, ValueError) as error:
        raise RegardError(
            "the manifest of a scan cannot be read",
            got=f"{path}: {error}",
            do="choose another folder, or remove that one",
        ) from None


def weights_hash(model: nn.Module) -> str:
    """Of every tensor of a model: its name, type, shape and numbers.

    >>> weights_hash(nn.Identity())[:8]
    'e3b0c442'
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            here = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            for piece in here.split(PIECE):
                digest.update(ctypes.string_at(piece.data_ptr(), len(piece)))
    return digest.hexdigest()


def configuration_hash(model: nn.Module) -> str:
    """The configuration that changes a model's results beside its weights: the number of heads, the
    base of rotary positions. Where it was read from does not count."""
    config: Any = getattr(model, "config", None)
    told = asdict(config) if isinstance(config, CausalConfig) else {}
    if hasattr(config, "to_dict"):
        told = {name: part for name, part in config.to_dict().items() if name not in NOT_TOLD}
    return _hash(told)


def tokenizer_hash(reader: Reader) -> str:
    """Of what tokens there are, which text they stand for, and how a text is cut into them."""
    tokenizer = reader.tokenizer
    if isinstance(reader, OwnReader):
        return _hash([sorted(tokenizer.vocabulary.items()), tokenizer.merges])
    rules = getattr(tokenizer, "backend_tokenizer", None)
    told = {} if rules is None else json.loads(rules.to_str())
    # How long texts are made was left there by the last call.
    told = {name: part for name, part in told.items() if name not in ("truncation", "padding")}
    return _hash([sorted(tokenizer.get_vocab().items()), told])


def _hash(told: Any) -> str:
    text = json.dumps(told, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(part: Any) -> Any:
    """What JSON does not know; a set prints in any order."""
    return sorted(map(str, part)) if isinstance(part, (set, frozenset)) else str(part)


def _library(reader: Reader) -> dict[str, str]:
    """Whose code a model is, where it is not regard's."""
    if not isinstance(reader, HuggingFaceReader):
        return {}
    from importlib.metadata import version

    return {"transformers": version("transformers")}


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text[:12] + "…" if len(text) == 64 else text[:80]
