"""The grid of calls that benchmarks/gpu_grid.py measures: cases, peers, checks, clock, tables."""
