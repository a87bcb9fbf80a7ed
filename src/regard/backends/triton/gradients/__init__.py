"""The kernels of the backward pass, which recompute the weights; backward.py says what they
compute, and runs them."""
