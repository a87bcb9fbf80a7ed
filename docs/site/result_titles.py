"""Results are written by programs, under the name of their file. On the site each has the title
that the list of them, docs/results.md, gives it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LISTED = re.compile(r"^(\S.*) <\.\./(benchmarks/results/\w+)>$", re.MULTILINE)


def titles(listing: str) -> dict[str, str]:
    """The title of each page of results.

    >>> titles("CPU: a Xeon <../benchmarks/results/cpu>")
    {'benchmarks/results/cpu': 'CPU: a Xeon'}
    """
    return {page: title for title, page in LISTED.findall(listing)}


def titled(text: str, title: str) -> str:
    """A page under another title.

    >>> titled("# cpu_half\\n\\n## forward", "CPU: half precision")
    '# CPU: half precision\\n\\n## forward'
    """
    return re.sub(r"\A# .*", lambda _: f"# {title}", text)


def retitle(app: Any, page: str, source: list[str]) -> None:
    """For Sphinx: a page of results is read under its title."""
    if page.startswith("benchmarks/results/"):
        found = titles(Path(app.srcdir, "docs/results.md").read_text(encoding="utf-8"))
        source[0] = titled(source[0], found.get(page, page))


def setup(app: Any) -> dict[str, bool]:
    """For Sphinx."""
    app.connect("source-read", retitle)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
