"""What was seen of a model while it ran, and its statistics."""

from regard.seen.joint_trace import joined, let_go
from regard.seen.looks import Looks
from regard.seen.mask_outline import Span, open_places, outline_of
from regard.seen.memory import Weight, shown
from regard.seen.seen import Address, Layer, Seen, Tokens, Traces
from regard.seen.statistics import Statistics, Sums, Waiting

__all__ = [
    "Address",
    "Layer",
    "Looks",
    "Seen",
    "Span",
    "Statistics",
    "Sums",
    "Tokens",
    "Traces",
    "Waiting",
    "Weight",
    "joined",
    "let_go",
    "open_places",
    "outline_of",
    "shown",
]
