"""The default title of a picture."""

from __future__ import annotations

from regard.seen import Seen


def captioned(what: object, name: str = "") -> str:
    """What a picture is of: the model, where it is known, and the head.

    >>> captioned(None, "head 0")
    'head 0'
    """
    model = what.model if isinstance(what, Seen) else ""
    return " · ".join(filter(None, (model, name)))
