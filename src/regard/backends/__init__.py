"""Ways to compute attention. `reference` defines right; the others are held to it."""
