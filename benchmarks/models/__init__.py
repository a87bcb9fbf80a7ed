"""Whole models: watched, monitored, scored, and run with regard by name."""
