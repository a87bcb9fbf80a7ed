"""Attention in linear time, with weights that can be looked into all the same."""

from regard.linear.calls import attention, trace
from regard.linear.features import RandomFeatures, elu_plus_one, random_features
from regard.linear.state import State

__all__ = [
    "RandomFeatures",
    "State",
    "attention",
    "elu_plus_one",
    "random_features",
    "trace",
]
