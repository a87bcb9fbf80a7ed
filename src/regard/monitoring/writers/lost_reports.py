"""Which reports could not be written, in words."""

from __future__ import annotations

from collections.abc import Sequence

from regard.errors import RegardError


def lost(where: object, steps: Sequence[int], why: str = "") -> RegardError:
    """What to say of steps whose reports did not get there."""
    return RegardError(
        "reports are lost: they could not be written",
        got=f"{where}{f' ({why})' if why else ''}, steps {listed(steps)}",
        do="take the last ones from the monitor's history",
    )


def listed(steps: Sequence[int]) -> str:
    """Numbers of steps, those at equal distances together.

    >>> listed([7, 50, 100, 150])
    '7, 50 to 150 every 50'
    """
    parts: list[str] = []
    at = 0
    while at < len(steps):
        end = min(at + 1, len(steps) - 1)
        apart = steps[end] - steps[at]
        while apart > 0 and end + 1 < len(steps) and steps[end + 1] - steps[end] == apart:
            end += 1
        if end - at < 2:
            parts.append(str(steps[at]))
            at += 1
        else:
            every = f" every {apart}" if apart > 1 else ""
            parts.append(f"{steps[at]} to {steps[end]}{every}")
            at = end + 1
    return ", ".join(parts)
