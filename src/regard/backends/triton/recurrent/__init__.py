"""Gated linear attention and the delta rule: a state from chunk to chunk, all else in parallel."""
