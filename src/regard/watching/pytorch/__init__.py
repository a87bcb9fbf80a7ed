"""PyTorch's own attention: its functions, its fast path, nested tensors and split sequences."""

from regard.watching.pytorch.attention_mode import AttentionMode, replaced
from regard.watching.pytorch.fast_path import FastPath

__all__ = ["AttentionMode", "FastPath", "replaced"]
