"""Every test of monitoring ends with nothing left behind of watching."""

from tests.watching.conftest import nothing_stays

__all__ = ["nothing_stays"]
