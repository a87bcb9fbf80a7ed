"""Sequences of different lengths: jagged nested tensors as one call, and the trace of it."""

from regard.jagged.inputs import JaggedInputs, any_nested, pack
from regard.jagged.trace import JaggedTrace

__all__ = ["JaggedInputs", "JaggedTrace", "any_nested", "pack"]
