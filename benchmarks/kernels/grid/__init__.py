"""The grid of calls that gpu_grid.py measures: cases, peers, checks, clock, tables."""
