"""Kernels on a CUDA GPU: whether they are right, how fast they are, and their settings."""
