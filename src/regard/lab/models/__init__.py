"""Models that experiments train and that fill a file of their own."""
