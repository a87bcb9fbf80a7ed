"""Kernels compiled before they are needed: those of the commonest calls, without a GPU, and those
of a call to come."""
