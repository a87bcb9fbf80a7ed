"""Biases: what is added to the logits, by position."""

from regard.biases.alibi import alibi, slopes
from regard.biases.bias import Bias
from regard.biases.dense import dense
from regard.biases.pairwise import pairwise
from regard.biases.relative import relative

__all__ = ["Bias", "alibi", "dense", "pairwise", "relative", "slopes"]
