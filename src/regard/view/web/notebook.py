"""What a notebook shows of a trace, or of an experiment, that is the last line of a cell.

The widget, where anywidget and the front end are installed. Else a page inside the cell, which
holds as many layers as are quick to write and small to keep; else what a terminal would show.
"""

from __future__ import annotations

import html
import io
import sys
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rich.console import Console

from regard.errors import RegardError
from regard.lab.apparatus.experiments import Result
from regard.seen import Seen
from regard.traces import Trace
from regard.view.atlas import Atlas, read
from regard.view.subjects import Subject, ViewOptions, look
from regard.view.terminal import head_grid, show
from regard.view.web.bundle import BUNDLE
from regard.view.web.html_page import chosen_levels, document, size
from regard.view.web.notebook_widget import installed, widget

MOST_PAIRS = 1 << 26
"""So many pairs are read for a cell: seconds on a CPU."""
MOST_BYTES = 2_000_000
"""About so many bytes of tiles are kept in a cell, and so in the notebook's file."""
HEIGHT, WIDTH = 640, 90

FRAME = (
    '<iframe srcdoc="{page}" sandbox="allow-scripts allow-downloads" title="attention" '
    'style="width:100%;height:{height}px;border:0"></iframe>'
)
PRINTED = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:1.15;'
    'font-family:ui-monospace,Menlo,Consolas,monospace">{code}</pre>'
)


@dataclass(frozen=True)
class Html:
    """Something to show, complete in itself."""

    text: str

    def _repr_html_(self) -> str:
        return self.text


def bundle(what: object) -> dict[str, Any]:
    """What is shown, by kinds of content, of which a notebook takes the best it can."""
    plain = {"text/plain": repr(what)}
    found: Any = shown(what) if _draws() else what
    if found is what:
        return plain
    if isinstance(found, Html):
        return {"text/html": found.text} | plain
    drawn, _ = found._repr_mimebundle_()
    return {**drawn, **plain}


def shown(what: object) -> Any:
    """The widget, or HTML; what was given, if there is nothing to see but its text."""
    if isinstance(what, Result):
        return _drawn(what)
    if not isinstance(what, Trace | Seen):
        raise RegardError(
            "this cannot be shown",
            got=type(what).__name__,
            accepted="Trace, Seen or the Result of an experiment",
        )
    layers = [[what]] if isinstance(what, Trace) else [layer.traces for layer in what.values()]
    first = [traces[0] for traces in layers if len(traces)]
    if any(0 in trace.inputs.shape for trace in first):
        return what
    if not first:
        return Html(_printed(head_grid(what))) if layers else what
    if not BUNDLE.exists():
        return _in_letters(what)
    if installed():
        return widget(what)
    atlas = Atlas.of(what)
    some = fitting(atlas)
    if not some.maps:
        return _in_letters(what)
    frame = FRAME.format(page=html.escape(document(some, MOST_BYTES)), height=HEIGHT)
    n, total = len(some.maps), len(atlas.maps)
    return Html(frame if n == total else frame + _left_out(f"{n} of {total} layers are shown here"))


def _drawn(result: Result) -> Any:
    """The panels of an experiment; its text, where there is no matplotlib to draw them with."""
    try:
        from regard.view.pictures.lab_cell import lab_cell
    except RegardError:
        return result
    return Html(lab_cell(result))


def fitting(atlas: Atlas) -> Atlas:
    """The first maps of an atlas, as many as are quick to write and small to keep."""
    pairs = accumulate(H * Q * K for H, Q, K in (m.shape for m in atlas.maps))
    most = sum(n <= MOST_PAIRS for n in pairs)
    for n in range(most, 0, -1):
        some = Atlas(atlas.maps[:n], atlas.model)
        levels = chosen_levels(some, MOST_BYTES)
        if sum(map(size, some.maps, levels)) <= MOST_BYTES:
            return some
    return Atlas([], atlas.model)


def _in_letters(what: Trace | Seen) -> Html:
    """What a terminal shows; of a long text no map, which would take a pass over all pairs."""
    pairs = [H * Q * K for H, Q, K in (m.shape for m in Atlas.of(what).maps)]
    if sum(pairs) > MOST_PAIRS:
        return Html(
            _printed(head_grid(what)) + _left_out("A map of this text would take long here")
        )
    title = what.model if isinstance(what, Seen) else ""
    tokens = read(what) if isinstance(what, Seen) else None
    console = _console()
    show(look(Subject(what, tokens, title, repr(what)), ViewOptions()), console)
    return Html(_exported(console))


def _left_out(what: str) -> str:
    return (
        f"<p>{what}. All of it: <code>pip install 'regard[notebook]'</code>, or "
        "<code>regard.view.serve(…)</code>, or <code>regard.view.page(…, path)</code>.</p>"
    )


def _console() -> Console:
    """Discards what is printed: in a notebook, rich would show every line itself."""
    return Console(
        file=io.StringIO(),
        record=True,
        width=WIDTH,
        force_terminal=True,
        force_jupyter=False,
        color_system="truecolor",
    )


def _printed(what: object) -> str:
    console = _console()
    console.print(what)
    return _exported(console)


def _exported(console: Console) -> str:
    return console.export_html(inline_styles=True, code_format=PRINTED)


def _draws() -> bool:
    """Whether whoever asks can show more than text: IPython in a terminal cannot."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is None or "text/html" in shell.display_formatter.active_types
