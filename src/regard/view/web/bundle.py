"""The front end, as one file that the build put beside the views."""

from __future__ import annotations

from pathlib import Path

from regard.errors import RegardError

BUNDLE = Path(__file__).parent.parent / "bundle" / "regard.js"


def script() -> str:
    """The program of every web view."""
    try:
        return BUNDLE.read_text("utf-8")
    except OSError:
        raise RegardError(
            "the front end of the web views has not been built",
            got=f"no {BUNDLE.name} in {BUNDLE.parent.name}",
            accepted="regard from a wheel or an sdist, or a checkout in which it was built",
            do="with node 18 or later and npm, install regard again; in a checkout: "
            "`make frontend`",
        ) from None
