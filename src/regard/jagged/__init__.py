"""Sequences of different lengths: jagged nested tensors, and tokens end to end, as one call, and the
trace of it."""

from regard.jagged.inputs import JaggedInputs, any_nested, pack, pack_tokens
from regard.jagged.trace import JaggedTrace

__all__ = ["JaggedInputs", "JaggedTrace", "any_nested", "pack", "pack_tokens"]
