"""Kernels for Hopper, in Gluon: one warp copies tiles, groups of four warps multiply them."""
