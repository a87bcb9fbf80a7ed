"""Sequences of different lengths in one call (jagged tensors, tokens end to end), and its trace."""

from regard.jagged.inputs import JaggedInputs, any_nested, pack, pack_tokens
from regard.jagged.trace import JaggedTrace

__all__ = ["JaggedInputs", "JaggedTrace", "any_nested", "pack", "pack_tokens"]
