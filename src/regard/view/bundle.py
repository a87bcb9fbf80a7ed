"""The front end, as one file that the build put here."""

from __future__ import annotations

from pathlib import Path

from regard.errors import RegardError

BUNDLE = Path(__file__).parent / "bundle" / "regard.js"


def script() -> str:
    """The program of every web view."""
    try:
        return BUNDLE.read_text("utf-8")
    except OSError:
        raise RegardError(
            "the front end of the web views has not been built",
            got=f"no {BUNDLE.name} in {BUNDLE.parent.name}",
            accepted="an installed wheel, or a checkout in which it was built",
            do="run `make frontend` (it needs node 18 or later and npm)",
        ) from None
