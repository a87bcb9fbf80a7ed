"""The texts that a model reads: in batches, what stands on both sides of attention, and probes."""
