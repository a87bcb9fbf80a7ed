"""Reading the `config.json` of a Hugging Face model, with nothing but the standard library.

Families differ in how they name sizes and in what they leave unsaid; what is unsaid is taken from
the defaults of the family's own configuration class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from regard.errors import RegardError
from regard.files import is_folder, read_json

_LARGEST = 1 << 20
"""Bytes of a file that is still taken for a configuration."""

_MOST_LAYERS = 10_000


class Family(NamedTuple):
    """What a family's files leave unsaid."""

    gated: bool = True
    tied: bool = False
    head_width: int = 0
    window_every: int = 1
    """Of so many layers all but one have the window. 1: all have it."""


FAMILIES: dict[str, Family] = {
    "gpt2": Family(gated=False, tied=True),
    "gpt_neox": Family(gated=False),
    "phi": Family(gated=False),
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen3": Family(head_width=128),
    "gemma": Family(tied=True, head_width=256),
    "gemma2": Family(tied=True, head_width=256, window_every=2),
    "gemma3_text": Family(tied=True, head_width=256, window_every=6),
}


def read(path: Path) -> dict[str, Any]:
    """The fields of a `Configuration`, from a file or from a folder's `config.json`."""
    if is_folder(path):
        path = path / "config.json"
    found = _loaded(path)
    kind = found.get("model_type")
    if kind not in (*FAMILIES,):
        raise RegardError(
            f"{path}: this family of models is not known here",
            got=f"model_type={kind!r}",
            accepted=", ".join(FAMILIES),
            do="give its sizes by hand: regard.cost.Configuration(name, width=..., heads=..., ...)",
        )
    family = FAMILIES[kind]
    layers = _size(path, found, "num_hidden_layers", "n_layer")
    if layers > _MOST_LAYERS:
        raise RegardError(f"{path}: too many layers", got=str(layers), accepted=f"≤ {_MOST_LAYERS}")
    return {
        "name": path.parent.name or kind,
        "width": _size(path, found, "hidden_size", "n_embd"),
        "heads": _size(path, found, "num_attention_heads", "n_head"),
        "layers": layers,
        "key_heads": _optional(path, found, "num_key_value_heads"),
        "head_width": _optional(path, found, "head_dim") or family.head_width,
        "feed_forward": _optional(path, found, "intermediate_size", "n_inner"),
        "gated": family.gated,
        "experts": _optional(path, found, "num_local_experts") or 1,
        "active_experts": _optional(path, found, "num_experts_per_tok") or 1,
        "vocabulary": _size(path, found, "vocab_size"),
        "tied": bool(found.get("tie_word_embeddings", family.tied)),
        "windows": _windows(path, found, family, layers),
        "dtype": _dtype(found),
        "trained_context": _optional(path, found, "max_position_embeddings", "n_positions") or None,
    }


def _loaded(path: Path) -> dict[str, Any]:
    wanted = "a Hugging Face config.json, or the folder it lies in"
    try:
        if path.is_file() and path.stat().st_size > _LARGEST:
            raise RegardError(f"{path} is too large for a configuration", accepted=wanted)
        found = read_json(path, _LARGEST)
    except RegardError:
        raise
    except (OSError, ValueError) as error:
        raise RegardError(
            "the configuration cannot be read", got=f"{path}: {error}", accepted=wanted
        ) from None
    # Models with vision keep the sizes of their language model inside, and their dtype outside.
    inner = found.get("text_config")
    if not isinstance(inner, dict) or "model_type" not in inner:
        return found
    said = {name: found[name] for name in ("torch_dtype", "dtype") if name in found}
    return inner if _says_dtype(inner) else inner | said


def _says_dtype(found: dict[str, Any]) -> bool:
    return bool(found.get("torch_dtype") or found.get("dtype"))


def _size(path: Path, found: dict[str, Any], *names: str) -> int:
    value = _optional(path, found, *names)
    if not value:
        raise RegardError(
            f"{path} does not say {names[0]}",
            got=f"model_type={found['model_type']!r} with {', '.join(sorted(found))}",
            accepted=f"a number above 0 under {' or '.join(names)}",
        )
    return value


def _optional(path: Path, found: dict[str, Any], *names: str) -> int:
    """The first of some numbers that is there; 0 if none is."""
    for name in names:
        value = found.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise RegardError(
                f"{path}: {name} must be a whole number", got=repr(value), accepted="0 or more"
            )
        return value
    return 0


def _windows(
    path: Path, found: dict[str, Any], family: Family, layers: int
) -> tuple[int | None, ...]:
    window = _optional(path, found, "sliding_window") or None
    if window is None or found.get("use_sliding_window") is False:
        return (None,)
    kinds = found.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if found["model_type"].startswith("qwen"):
        if not found.get("use_sliding_window"):
            return (None,)
        first = min(_optional(path, found, "max_window_layers"), layers)
        return (None,) * first + (window,) * (layers - first)
    every = _optional(path, found, "sliding_window_pattern") or family.window_every
    return (window,) if every == 1 else (window,) * (every - 1) + (None,)


def _dtype(found: dict[str, Any]) -> str:
    name = str(found.get("torch_dtype") or found.get("dtype") or "float32")
    return name.removeprefix("torch.")
