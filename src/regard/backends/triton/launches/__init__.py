"""Launches of kernels, past Triton's own launcher: what each is compiled for, its binary, and the
driver that takes it."""
