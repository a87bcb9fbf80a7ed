"""Additive attention: w·tanh(q + k) of every pair, in tiles that are never written down."""
