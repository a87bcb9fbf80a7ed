"""Masks: which query may attend to which key. Values that combine with `&`, `|` and `~`.

>>> from regard import masks
>>> longformer = masks.window(256, 256) | masks.global_tokens([0])
>>> longformer
window(256, 256) | global_tokens([0])
"""

from regard.masks.algebra import Mask
from regard.masks.blocks import blocks
from regard.masks.causal import causal
from regard.masks.convert import (
    from_flash,
    from_huggingface,
    from_multihead,
    from_sdpa,
)
from regard.masks.dilated import dilated
from regard.masks.documents import documents
from regard.masks.global_tokens import global_tokens
from regard.masks.keep import ignore, keep
from regard.masks.padding import padding
from regard.masks.prefix import prefix
from regard.masks.where import where
from regard.masks.window import window

__all__ = [
    "Mask",
    "blocks",
    "causal",
    "dilated",
    "documents",
    "from_flash",
    "from_huggingface",
    "from_multihead",
    "from_sdpa",
    "global_tokens",
    "ignore",
    "keep",
    "padding",
    "prefix",
    "where",
    "window",
]
