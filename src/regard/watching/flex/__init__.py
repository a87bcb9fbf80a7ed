"""FlexAttention: its calls, with its masks and score functions as masks and biases of regard."""

from regard.watching.flex.calls import FlexCalls

__all__ = ["FlexCalls"]
