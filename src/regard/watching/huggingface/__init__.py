"""Hugging Face models: their attention as calls of regard's, their masks without n×n.

While a model is watched its attention implementation is `regard`: a function that transformers
calls with queries, keys and values, and one that it calls to make masks.

This room imports transformers, and is imported only when a model of theirs may exist.
"""

# Imported for what it does: it registers what transformers calls by the name of regard.
from regard.watching.huggingface import interface as interface
from regard.watching.huggingface.attention import attend
from regard.watching.huggingface.hints import hint
from regard.watching.huggingface.mask_maker import make_mask
from regard.watching.huggingface.modules import (
    attenders,
    attenders_by_name,
    family,
    islands,
    needs_asking,
    never_attends,
    refuse_by_hand,
)
from regard.watching.huggingface.switch import NAME, Switch

__all__ = [
    "NAME",
    "Switch",
    "attend",
    "attenders",
    "attenders_by_name",
    "family",
    "hint",
    "islands",
    "make_mask",
    "needs_asking",
    "never_attends",
    "refuse_by_hand",
]
