"""Which text a layer's queries read, and which its keys, in models that read one and write another.

Lengths tell it too, until both texts happen to have the same."""

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


class Sides(NamedTuple):
    """The text of the queries, and that of the keys."""

    query: str
    key: str


def sides_named(path: str) -> Sides | None:
    """What a layer's path says of them; None where it is neither of an encoder nor of a decoder.

    >>> sides_named("model.decoder.layers.0.encoder_attn")
    Sides(query='decoder', key='encoder')
    >>> sides_named("encoder.block.0.layer.0.SelfAttention")
    Sides(query='encoder', key='encoder')
    """
    if CROSS.search(path):
        return Sides("decoder", "encoder")
    # A decoder may be made of what is an encoder elsewhere.
    for name in ("decoder", "encoder"):
        if name in path.split("."):
            return Sides(name, name)
    return None


def refuse_two_texts(paths: Iterable[str], do: str) -> None:
    """Refuse layers whose keys are tokens of different texts."""
    named = {path: sides for path in paths if (sides := sides_named(path)) is not None}
    first = {sides.key: path for path, sides in reversed(named.items())}
    if len(first) > 1:
        raise RegardError(
            "tokens are scored over layers that look at the same ones",
            got=", ".join(f"{path}: keys of the {key}" for key, path in first.items()),
            do=do,
        )


def refuse_cross(paths: Iterable[str]) -> None:
    """Refuse layers whose queries and keys are those of different texts."""
    for path in paths:
        sides = sides_named(path)
        if sides is not None and sides.query != sides.key:
            raise RegardError(
                "layers are multiplied if all of them mix the same places",
                got=f"{path}: queries of the {sides.query} over keys of the {sides.key}",
                accepted="self-attention of one text, read at once",
                do="name layers of one kind in layers=",
            )


def refuse_untold_target(path: str, call: Any) -> None:
    """Refuse a decoder's layer where the model made up what it reads: from the other text, one
    place further on."""
    told = isinstance(call, Mapping) and call.get("decoder_input_ids") is not None
    sides = sides_named(path)
    if not told and sides is not None and sides.query == "decoder":
        raise RegardError(
            f"what {path!r} reads is not known: the model was given one text of two",
            accepted='both: {"input_ids": ids, "decoder_input_ids": target}',
            do='give both, or name the layers of the encoder: layers="*encoder.*"',
        )
