"""Attention written out by hand: two products and a softmax between them."""

from regard.watching.by_hand.dataflow import keeps_apart
from regard.watching.by_hand.hand_written import FOLDS, STEPS, HandWritten, Unseen

__all__ = ["FOLDS", "STEPS", "HandWritten", "Unseen", "keeps_apart"]
