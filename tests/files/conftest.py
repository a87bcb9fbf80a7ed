"""Every test of files ends with nothing left behind of watching."""

from tests.watching.conftest import nothing_stays

__all__ = ["nothing_stays"]
