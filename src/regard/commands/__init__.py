"""The commands of `regard`, one a file."""
