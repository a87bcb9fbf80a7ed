"""The front end, in the files that the build put beside the views.

`regard` is what a page and a widget need first, `app` what the app does; `later` holds the views
that are opened from there, and is loaded when the first of them is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from regard.errors import RegardError

Part = Literal["regard", "app", "later"]
BUNDLE = Path(__file__).parent.parent / "bundle" / "regard.js"


def script(part: Part = "regard") -> str:
    """A part of the program of the web views."""
    file = BUNDLE.with_name(f"{part}.js")
    try:
        return file.read_text("utf-8")
    except OSError:
        raise RegardError(
            "the front end of the web views has not been built",
            got=f"no {file.name} in {file.parent.name}",
            accepted="regard from a wheel or an sdist, or a checkout in which it was built",
            do="with node 18 or later and npm, install regard again; in a checkout: "
            "`make frontend`",
        ) from None
