"""The file of a shard: written whole or not at all, and held against its checksums when read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from regard.errors import RegardError
from regard.files import replacing
from regard.scanning.states import LayerState, State
from regard.trace_files.tensor_file import Draft, Place, Source

KEY = "regard.scan"
COUNTS = ("texts", "tokens", "cut", "empty")


def write(path: Path, state: State, settings: str, shard: int) -> None:
    """What was found of a shard, under the hash of the settings it was found with."""
    draft, layers = Draft(), []
    places: dict[str, Place] = {}
    for i, (layer, found) in enumerate(state.layers.items()):
        layers.append(layer)
        for name, tensor in found.tensors().items():
            # A tensor of its own each: what is alike by chance is not stored once.
            places[f"{i}/{name}"] = draft.put(f"{i}/{name}", tensor.clone())

    def described(checks: Mapping[str, str]) -> dict[str, str]:
        about = {
            "settings": settings,
            "shard": shard,
            **{name: getattr(state, name) for name in COUNTS},
            "layers": layers,
            "tensors": {name: [*place, checks[place.name]] for name, place in places.items()},
        }
        return {KEY: _sealed(about)}

    with replacing(path) as unfinished, unfinished.open("wb") as file:
        draft.write(file, described, None)


def read(path: Path, settings: str, shard: int) -> State | None:
    """What a file holds, if it is that shard, whole, and of these settings; else None."""
    if not path.exists():
        return None
    try:
        source = Source(path, torch.device("cpu"))
    except RegardError:
        return None
    try:
        about = _opened(source.metadata[KEY])
        if (about["settings"], about["shard"]) != (settings, shard):
            return None
        layers: dict[str, LayerState] = {}
        tensors = {
            name: source.read(Place(*place), check)
            for name, (*place, check) in about["tensors"].items()
        }
        for i, layer in enumerate(about["layers"]):
            start = f"{i}/"
            mine = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
            layers[layer] = LayerState.read(mine)
        return State(layers, **{name: about[name] for name in COUNTS})
    except (RegardError, KeyError, ValueError, TypeError):
        return None
    finally:
        source.close()


def _sealed(about: Mapping[str, Any]) -> str:
    text = json.dumps(about, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}{text}"


def _opened(sealed: str) -> dict[str, Any]:
    check, text = sealed[:8], sealed[8:]
    if f"{zlib.crc32(text.encode()):08x}" != check:
        raise ValueError("what the file says of itself was changed")
    found: dict[str, Any] = json.loads(text)
    return found
