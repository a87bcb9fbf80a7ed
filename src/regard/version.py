"""The version of regard, where every file can ask for it."""

__version__ = "0.1.0"
