"""Measurements, run from the root of the repository: `python -m benchmarks.calls.cpu`."""
