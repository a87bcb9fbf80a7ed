"""Attention in linear time, with weights that can be looked into all the same."""

from regard.linear.calls import attention, trace
from regard.linear.features import RandomFeatures, elu_plus_one, random_features
from regard.linear.gated import delta, delta_trace, gated, gated_trace
from regard.linear.signed_trace import SignedTrace
from regard.linear.state import State

__all__ = [
    "RandomFeatures",
    "SignedTrace",
    "State",
    "attention",
    "delta",
    "delta_trace",
    "elu_plus_one",
    "gated",
    "gated_trace",
    "random_features",
    "trace",
]
