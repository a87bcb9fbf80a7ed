"""Models by name: loaded without running anybody's code, and recorded while they read a text."""
