"""A model's folder as transformers is shown it: only files that cannot run code.

What transformers reads is not only what lies in the folder under the usual names: an index names
files of weights, config.json can name an adapter's, and a folder of a distributed checkpoint comes
before any of them. Some of these are pickles, which run code when they are read. So the files that
were checked are linked into a temporary folder, and transformers reads that.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from regard.errors import RegardError
from regard.files import read_json

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")

WORDS = (".json", ".txt", ".model", ".tiktoken", ".codes", ".jinja")
"""How the names of files end that tokenizers read."""
UNREAD = ("adapter_config.json",)
"""Sends the reader on to another model."""

CHOICES = (
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
    "fusion_config", "kernel_config", "transformers_weights",
)  # fmt: skip
"""What a configuration does not decide here: which code runs, some of which is fetched from a hub,
and which files are read."""

LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers",
)  # fmt: skip
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
FEW = 64
"""So many layers may share the weights of one."""


class Staged(NamedTuple):
    """A folder to read, and how many numbers its weights hold."""

    folder: Path
    numbers: int


@contextmanager
def staged(folder: Path) -> Iterator[Staged]:
    """The checked files of a model, in a temporary folder."""
    there = _names(folder)
    if CONFIG not in there:
        raise RegardError(
            "the folder holds no model",
            got=f"{folder}, without {CONFIG}",
            accepted="a folder that save_pretrained wrote",
        )
    weights = _weights(folder, there)
    shapes = {
        name: shape for path in weights for name, shape in stored_shapes(folder / path).items()
    }
    numbers = sum(map(math.prod, shapes.values()))
    config = configuration(folder)
    _refuse_counts(folder, config, len(shapes), numbers)
    with tempfile.TemporaryDirectory(prefix="regard-") as made:
        to = Path(made)
        (to / CONFIG).write_text(json.dumps(config))
        plain = [
            name
            for name in there
            if name.endswith(WORDS)
            and not name.endswith(".index.json")
            and name not in (*UNREAD, CONFIG)
            and (folder / name).is_file()
        ]
        index = [] if WEIGHTS in weights else [INDEX]
        for name in (*plain, *weights, *index):
            _link(folder / name, to / name)
        yield Staged(to, numbers)


def configuration(folder: Path) -> dict[str, Any]:
    """What config.json says, without what it does not decide."""
    try:
        found = _without_choices(read_json(folder / CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise RegardError(
            f"{CONFIG} of the model cannot be read", got=f"{folder}: {error}"
        ) from None
    assert isinstance(found, dict)
    return found


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise RegardError(
            "the folder cannot be read", got=f"{folder}: {error.strerror or error}"
        ) from None


def shards(path: Path) -> list[str]:
    """The files of weights that an index names."""
    try:
        index = read_json(path)
        names = set(dict(index["weight_map"]).values())
        odd = [n for n in names if not isinstance(n, str) or Path(n).name != n]
        if odd or not names:
            raise ValueError(f"no files of this folder: {odd!r:.80}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise RegardError(
            "the index of the weights cannot be read",
            got=f"{path}: {reason}",
            accepted="an index as save_pretrained writes it: safetensors files beside it",
        ) from None
    foreign = sorted(name for name in names if not name.endswith(".safetensors"))
    if foreign:
        raise _no_safetensors(path.parent, foreign)
    return sorted(names)


def _weights(folder: Path, there: list[str]) -> list[str]:
    if WEIGHTS in there:
        return [WEIGHTS]
    if INDEX in there:
        return shards(folder / INDEX)
    raise _no_safetensors(folder, [name for name in there if name.endswith(PICKLED)])


def _no_safetensors(folder: Path, pickled: list[str]) -> RegardError:
    return RegardError(
        "the folder holds no safetensors weights",
        got=f"{folder}: {', '.join(pickled[:4]) or 'no weights at all'}",
        accepted="model.safetensors; pickled weights can run code when they are read",
        do="if you trust them, load them with transformers and write them again with "
        "model.save_pretrained(folder)",
    )


def stored_shapes(path: Path) -> dict[str, list[int]]:
    """The shape of each tensor in a file of weights that is there, and whole."""
    try:
        if not path.is_file():
            raise OSError("there is no such file")
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise RegardError(
            "the weights of the model cannot be read",
            got=f"{path}: {str(error).splitlines()[0]}",
            accepted="a whole safetensors file; this one may have been cut short",
            do="get the file again",
        ) from None


def _refuse_counts(folder: Path, node: Any, tensors: int, numbers: int) -> None:
    """A configuration cannot ask for more modules than there are weights for."""
    if not isinstance(node, dict):
        return
    for name, value in node.items():
        most = FEW + 4 * tensors if name in LAYERS else numbers if name in EXPERTS else None
        if most is not None and isinstance(value, int) and value > most:
            raise RegardError(
                f"{CONFIG} asks for more than the weights hold",
                got=f"{folder}: {name}={value:.3g}, and {tensors} tensors of {numbers} numbers",
                do="get the files again",
            )
        _refuse_counts(folder, value, tensors, numbers)


def _without_choices(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _without_choices(v) for name, v in node.items() if name not in CHOICES}
    return [_without_choices(v) for v in node] if isinstance(node, list) else node


def _link(there: Path, here: Path) -> None:
    try:
        here.symlink_to(there.absolute())
    except OSError:  # Not every system lets everybody make links.
        shutil.copyfile(there, here)
