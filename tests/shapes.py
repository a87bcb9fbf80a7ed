"""The checker behind the shape annotations, in tests only: an int is a float, as Python has it."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
