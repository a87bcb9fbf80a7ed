"""The report as one HTML file: the verdict, the table, and texts shaded by effect and scores."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from regard.display import table_html
from regard.interpret.faithfulness_report.token_scores import TokenScores
from regard.visible import visible

if TYPE_CHECKING:
    from regard.interpret.faithfulness_report.report import Faithfulness

TEXTS = 20
"""Texts that are shown at most."""
STYLE = """
:root { color-scheme: light dark; --ink: 31, 119, 180; --less: 200, 60, 40; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .15rem .8rem .15rem 0; white-space: nowrap; font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 1rem 0; }
dt { opacity: .75; }
dd { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
p { opacity: .8; margin: .2rem 0; }
"""


def page(report: Faithfulness) -> str:
    """The whole file. Nothing in it is fetched, and no text in it is markup."""
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Faithfulness: {html.escape(report.metric)}</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(report.verdict)}</h1>",
        table_html(report.table(), header=True, numbers=True, notes=report.notes()),
        "<p>Below: the darker a token, the more cutting its edges did, or the larger its score, "
        "in its line. Blue raised the metric when it was cut, red lowered it.</p>",
    ]
    parts += [_text(text) for text in report.texts[:TEXTS]]
    if len(report.texts) > TEXTS:
        parts.append(f"<p>… and {len(report.texts) - TEXTS} more texts</p>")
    return "\n".join([*parts, "</body></html>"])


def _text(text: TokenScores) -> str:
    lines = [_line("effect of cutting", text.words, text.effect)]
    lines += [_line(method, text.words, score) for method, score in text.scores.items()]
    return f"<dl>{''.join(lines)}</dl>"


def _line(name: str, words: tuple[str, ...], numbers: Float[Tensor, "n"]) -> str:
    most = float(numbers.abs().max()) or 1.0
    shaded = []
    for word, number in zip(words, [*numbers.tolist(), 0.0], strict=True):
        colour = "--less" if number < 0 else "--ink"
        shade = f"background: rgba(var({colour}), {0.8 * abs(number) / most:.2f})"
        shown = html.escape(visible(word))
        shaded.append(f'<span style="{shade}" title="{number:.3g}">{shown}</span>')
    return f"<dt>{html.escape(name)}</dt><dd>{''.join(shaded)}</dd>"
