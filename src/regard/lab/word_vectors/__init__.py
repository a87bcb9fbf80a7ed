"""Vectors of words: trained here, read from a file, or those of a published package."""

from regard.lab.word_vectors.published import GLOVE, glove
from regard.lab.word_vectors.skip_gram import train
from regard.lab.word_vectors.vector_files import read
from regard.lab.word_vectors.vectors import Vectors

__all__ = ["GLOVE", "Vectors", "glove", "read", "train"]
