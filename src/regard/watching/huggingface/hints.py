"""What helps to see attention of transformers that is computed by hand."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from regard.watching.huggingface.modules import what_helps
from regard.watching.huggingface.switch import switched


def hint(model: nn.Module, path: str) -> str:
    """What helps to see a module that computes attention by hand, if transformers made it."""
    for above in _upwards(path):
        part = model.get_submodule(above)
        if isinstance(part, PreTrainedModel) and type(part).__module__.startswith("transformers."):
            held = switched.get(id(part.config))
            return what_helps(part, part.config._attn_implementation if held is None else held.own)
    return ""


def _upwards(path: str) -> Iterator[str]:
    """A path, and those of the modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
