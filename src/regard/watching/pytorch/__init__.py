"""PyTorch's own attention: its functions, its fast path, nested tensors and split sequences."""

from regard.watching.pytorch.attention_mode import AttentionMode, replaced
from regard.watching.pytorch.fast_path import FastPath
from regard.watching.pytorch.plain_layers import spare, stop_sparing
from regard.watching.pytorch.split_sequences import refuse_on_ranks

__all__ = ["AttentionMode", "FastPath", "refuse_on_ranks", "replaced", "spare", "stop_sparing"]
