"""Passes replayed: what was decided and launched for one call of a kind serves the others."""
