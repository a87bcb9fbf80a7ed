"""The page of an experiment: what it claims, what was done, what came out, what to change next.

One HTML file with its pictures in it, on light and on dark paper. It asks the network for nothing
and runs no script.
"""

from __future__ import annotations

import base64
import io
import os
from html import escape
from pathlib import Path

from regard.files import replacing
from regard.lab.apparatus.experiments import Result
from regard.lab.apparatus.panels import Panel
from regard.view.pictures.lab_picture import panel_picture

STYLE = """
:root { color-scheme: light dark; --paper: #fcfbf8; --panel: #f4f2ec; --ink: #1c1e26;
  --faint: #5c5f69; --line: #d9d5c9; --good: #0b6e4f; --bad: #b3400a; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --panel: #1d2027; --ink: #e9e7e1;
  --faint: #a0a4ae; --line: #363a45; --good: #5cc8a1; --bad: #ff9d5c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 17px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px clamp(16px, 4vw, 40px) 64px; }
header, section > p, section > ul { max-width: 68ch; }
h1 { font-size: clamp(26px, 5vw, 36px); line-height: 1.2; margin: 4px 0 16px;
  letter-spacing: -0.015em; }
h2 { font-size: 20px; margin: 40px 0 8px; }
p { margin: 0 0 12px; }
.over { color: var(--faint); font-size: 14px; margin: 0; }
.claim { border-left: 3px solid var(--line); padding-left: 16px; color: var(--faint); }
.claim b { color: var(--ink); }
.verdict { font-weight: 600; }
.yes { color: var(--good); } .no { color: var(--bad); }
.figures { display: grid; gap: 28px 24px; margin: 20px 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); }
figure { margin: 0; }
figure img { display: block; width: 100%; max-width: 480px; height: auto; }
figcaption { font-size: 14.5px; line-height: 1.45; color: var(--faint); margin-top: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 15px; }
th, td { text-align: left; vertical-align: top; padding: 7px 14px 7px 0;
  border-bottom: 1px solid var(--line); }
th { font-weight: 500; color: var(--faint); }
td:first-child { white-space: nowrap; }
details { margin-top: 32px; }
summary { cursor: pointer; }
pre { max-height: 420px; overflow: auto; background: var(--panel); padding: 14px 16px;
  border-radius: 8px; font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
footer { margin-top: 40px; padding-top: 12px; border-top: 1px solid var(--line);
  color: var(--faint); font-size: 14px; }
code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 0.92em; }
@media (max-width: 560px) { body { font-size: 16px; } td:first-child { white-space: normal; } }
"""

SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · regard lab</title>
<style>{style}</style>
</head>
<body>
<main>
<header>
<p class="over">regard lab · {name}</p>
<h1>{title}</h1>
<p class="claim"><b>The claim.</b> {claim}</p>
</header>
<section>
<h2>What came out</h2>
<p class="verdict {word}">{verdict}</p>
<p>{answer}</p>
<div class="figures">
{figures}
</div>
</section>
<section>
<h2>The claim, part by part</h2>
<div class="wide"><table>
<tr><th></th><th>the claim says</th><th>found</th></tr>
{checks}
</table></div>
</section>
<section>
<h2>What was done</h2>
{method}
</section>
<section>
<h2>What to change next</h2>
<ul>
{change}
</ul>
</section>
<details>
<summary>The numbers</summary>
<pre>{numbers}</pre>
</details>
<footer>
<p>Run with {settings}. The code is <code>regard/lab/{name}.py</code>;
<code>regard lab {name}</code> runs it again, <code>--full</code> for longer.</p>
</footer>
</main>
</body>
</html>
"""


def lab_page(result: Result, path: str | os.PathLike[str]) -> Path:
    """Write the page of a result.

    >>> import tempfile
    >>> from regard.lab import scaling
    >>> result = scaling.run(widths=(16, 64, 256), samples=32, steps=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = lab_page(result, f"{folder}/scaling.html").read_text()
    >>> page.count("<figure>"), "http://" in page or "https://" in page
    (4, False)
    """
    about = result.about
    made = SHELL.format(
        style=STYLE,
        name=escape(about.name),
        title=escape(about.title),
        claim=escape(about.claim),
        word="yes" if result.supported else "no",
        verdict=escape(result.verdict),
        answer=escape(result.answer),
        figures="\n".join(_figure(result, panel) for panel in result.panels),
        checks="\n".join(
            f'<tr><td class="{"yes" if c.holds else "no"}">'
            f"{'✓ holds' if c.holds else '✗ does not hold'}</td>"
            f"<td>{escape(c.says)}</td><td>{escape(c.found)}</td></tr>"
            for c in result.checks
        ),
        method="\n".join(f"<p>{escape(text)}</p>" for text in about.method),
        change="\n".join(f"<li>{escape(text)}</li>" for text in about.change),
        numbers=escape(result.json()),
        settings=escape(", ".join(f"{name} {_shown(v)}" for name, v in result.settings.items())),
    )
    with replacing(Path(path)) as unfinished:
        unfinished.write_text(made, "utf-8")
    return Path(path)


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _figure(result: Result, panel: Panel) -> str:
    light, dark = (panel_data(result, panel, dark) for dark in (False, True))
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(f"{panel.title}. {panel.caption}")}"></picture>'
        f"<figcaption>{escape(panel.caption)}</figcaption></figure>"
    )


def panel_data(result: Result, panel: Panel, dark: bool) -> str:
    """A panel as the address of an image that holds it."""
    figure, png = panel_picture(result, panel, dark=dark), io.BytesIO()
    figure.savefig(png, format="png", dpi=200, facecolor="none")
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
