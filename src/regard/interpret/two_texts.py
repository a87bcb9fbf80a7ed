"""Which text a layer's queries read, and which its keys, in models that read one and write another.

Lengths show it too, unless both texts happen to have the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from regard.errors import RegardError

CROSS = re.compile(
    r"(^|\.)(memory|encoder_attn|encoder_decoder_attention|cross_?attn|cross_?attention"
    r"|EncDecAttention)(\.|$)|(^|\.)decoder\.layers\.(\d+|\*)\.multihead_attn$",
    re.I,
)
"""What layers are called that look from one text at another; also with a star for their number."""


class LayerTexts(NamedTuple):
    """The text that queries of a layer stand in, and that of its keys."""

    query: str
    key: str


def texts_named(path: str) -> LayerTexts | None:
    """What a layer's path says of them; None where it is neither of an encoder nor of a decoder.

    >>> texts_named("model.decoder.layers.0.encoder_attn")
    LayerTexts(query='decoder', key='encoder')
    >>> texts_named("encoder.block.0.layer.0.SelfAttention")
    LayerTexts(query='encoder', key='encoder')
    """
    if CROSS.search(path):
        return LayerTexts("decoder", "encoder")
    # A decoder may be made of what is an encoder elsewhere.
    for name in ("decoder", "encoder"):
        if name in path.split("."):
            return LayerTexts(name, name)
    return None


def refuse_two_texts(paths: Iterable[str], do: str) -> None:
    """Refuse layers whose keys are tokens of different texts."""
    named = {path: texts for path in paths if (texts := texts_named(path)) is not None}
    first = {texts.key: path for path, texts in reversed(named.items())}
    if len(first) > 1:
        raise RegardError(
            "tokens are scored over layers that look at the same ones",
            got=", ".join(f"{path}: keys of the {key}" for key, path in first.items()),
            do=do,
        )


def refuse_cross(paths: Iterable[str]) -> None:
    """Refuse layers whose queries and keys are those of different texts."""
    for path in paths:
        texts = texts_named(path)
        if texts is not None and texts.query != texts.key:
            raise RegardError(
                "layers are multiplied if all of them mix the same places",
                got=f"{path}: queries of the {texts.query} over keys of the {texts.key}",
                accepted="self-attention of one text, read at once",
                do="name layers of one kind in layers=",
            )


def refuse_unknown_target(path: str, call: Any) -> None:
    """Refuse a decoder's layer where the model made up what it reads: from the other text, one
    place further on."""
    told = isinstance(call, Mapping) and call.get("decoder_input_ids") is not None
    texts = texts_named(path)
    if not told and texts is not None and texts.query == "decoder":
        raise RegardError(
            f"what {path!r} reads is not known: the model was given one text of two",
            accepted='both: {"input_ids": ids, "decoder_input_ids": target}',
            do='give both, or name the layers of the encoder: layers="*encoder.*"',
        )
