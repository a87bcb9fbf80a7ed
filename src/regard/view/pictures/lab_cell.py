"""What an experiment found, as HTML inside a page of somebody else's: a notebook, a site.

Every panel is drawn twice, for light and for dark paper, and the page shows the one that fits: by
what it says of its theme (Jupyter, VS Code, Furo), else by what the reader prefers.
"""

from __future__ import annotations

from html import escape

from regard.lab.apparatus.experiments import Check, Result
from regard.lab.apparatus.panels import Panel
from regard.view.pictures.lab_page import panel_data

DARK = ('[data-theme="dark"]', '[data-jp-theme-light="false"]', ".vscode-dark")
LIGHT = ('[data-theme="light"]', '[data-jp-theme-light="true"]', ".vscode-light")
"""How pages say on their body, or above it, what they are."""


def lab_cell(result: Result) -> str:
    """The verdict, every panel with its caption, and each part of the claim.

    >>> from regard.lab import scaling
    >>> made = lab_cell(scaling.run(widths=(16, 64, 256), samples=32, steps=0))
    >>> made.count("<figure"), made.count("<img"), "http" in made
    (4, 8, False)
    """
    figures = "\n".join(_figure(result, panel) for panel in result.panels)
    checks = "\n".join(map(_row, result.checks))
    head = "<tr><th></th><th>the claim says</th><th>found</th></tr>"
    return (
        f"<style>{_style()}</style>\n"
        f'<div class="regard-lab"><p><b>{escape(result.verdict)}</b> {escape(result.answer)}</p>\n'
        f'<div class="regard-panels">\n{figures}\n</div>\n'
        f"<table>\n{head}\n{checks}\n</table></div>"
    )


def _figure(result: Result, panel: Panel) -> str:
    alt = escape(f"{panel.title}. {panel.caption}")
    pictures = "".join(
        f'<img class="regard-{name}" alt="{alt}" src="{panel_data(result, panel, dark)}">'
        for name, dark in (("light", False), ("dark", True))
    )
    return f"<figure>{pictures}<figcaption>{escape(panel.caption)}</figcaption></figure>"


def _row(check: Check) -> str:
    mark = "✓ holds" if check.holds else "✗ does not hold"
    return f"<tr><td>{mark}</td><td>{escape(check.says)}</td><td>{escape(check.found)}</td></tr>"


def _style() -> str:
    named = "".join(
        f"{page} .regard-lab .regard-{name} {{ display: {how}; }}\n"
        for pages, shown in ((DARK, "dark"), (LIGHT, "light"))
        for page in pages
        for name in ("light", "dark")
        for how in ["block" if name == shown else "none"]
    )
    return (
        ".regard-panels { display: grid; gap: 20px; margin: 16px 0;\n"
        "  grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); }\n"
        ".regard-lab figure { margin: 0; }\n"
        ".regard-lab img { width: 100%; max-width: 480px; height: auto; background: none; }\n"
        ".regard-lab figcaption { font-size: 0.85em; line-height: 1.45; opacity: 0.8; }\n"
        ".regard-lab td { text-align: left; vertical-align: top; }\n"
        ".regard-lab .regard-dark { display: none; }\n"
        "@media (prefers-color-scheme: dark) {\n"
        ".regard-lab .regard-light { display: none; }\n"
        ".regard-lab .regard-dark { display: block; } }\n"
        f"{named}"
    )
