"""Hugging Face models: their attention as calls of regard's, their masks without n×n.

A model may be loaded with `attn_implementation="regard"`; while one is watched its implementation
is regard's too: a function that transformers calls with queries, keys and values, and one that it
calls to make masks.

This room imports transformers, and is imported only when a model of theirs may exist.
"""

# Imported for what they do: they register what transformers calls by the names of regard.
from regard.watching.huggingface import by_name as by_name
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
]
