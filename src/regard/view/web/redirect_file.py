"""A file that leads a browser to the app.

Every user of a machine can read the command lines of all programs, and the address that a browser
opens is on its command line. So the browser opens a file that no other user can read, which holds
the address.
"""

from __future__ import annotations

import html
import os
import shutil
import tempfile
from pathlib import Path

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>regard</title>
</head>
<body><a rel="noreferrer" href="{address}">Open the app.</a></body>
</html>
"""


class RedirectFile:
    """In a folder of its own; both are for this user alone.

    >>> file = RedirectFile("http://127.0.0.1:1/secret/#head=1&map=2")
    >>> oct(file.path.stat().st_mode & 0o777), "#head=1&amp;map=2" in file.path.read_text()
    ('0o600', True)
    >>> file.remove()
    >>> file.path.parent.exists()
    False
    """

    def __init__(self, address: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="regard-"))
        self.path = folder / "open.html"
        try:
            made = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(made, "w", encoding="utf-8") as file:
                file.write(PAGE.format(address=html.escape(address)))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take the file away, if it is still there."""
        shutil.rmtree(self.path.parent, ignore_errors=True)
