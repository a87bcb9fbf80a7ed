"""The view at which the command opens the app, and whether it can."""

from __future__ import annotations

import os
import sys
import webbrowser
from dataclasses import replace
from urllib.parse import urlencode

from regard.errors import RegardError
from regard.seen import Seen
from regard.traces import Trace
from regard.view.atlas import Atlas, clean, head_figures, layer_of, refuse_places
from regard.view.subjects import SPELLING, Subject, ViewOptions, chosen_head, placed, refuse_parts
from regard.view.web import BUNDLE

SHORT = 1024
"""Of texts that are not longer, the sharpest head is looked for before the first is shown."""


def why_not() -> str:
    """Why the app does not open unless asked for by name; empty if it can."""
    if not sys.stdout.isatty():
        return "standard output is no terminal"
    if not BUNDLE.exists():
        return "the front end of the app has not been built (make frontend)"
    return "" if _browser() else "no browser was found"


def _browser() -> bool:
    """Whether there is a browser with windows. One that draws into the terminal is of no use."""
    windows = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return windows


def first_view(subject: Subject, atlas: Atlas, wanted: ViewOptions) -> str:
    """What the app shows first, as the end of its address: what the command named, else a head of
    which it is known what it does, else the sharpest of a short text.

    >>> import regard, torch
    >>> x = torch.zeros(1, 2, 3, 4)
    >>> subject = Subject(regard.trace(x, x, x), ["to", "be", "or"], "", "")
    >>> atlas = Atlas.of(subject.what, subject.tokens)
    >>> first_view(subject, atlas, ViewOptions(head="1", token="be"))
    'head=1&view=text&token=1'
    """
    if not atlas.maps:
        refuse_parts(wanted)
        return ""
    wanted = _settled(subject, atlas, wanted)
    place = _map(subject.what, atlas, wanted.layer or "0")
    heads, Q, K = atlas[place].shape
    view: dict[str, object] = {"map": place} if place else {}
    if subject.told.model == SPELLING:
        # Few words, and none that takes nearly all: nothing has to be brought out.
        view["scale"] = "linear"
    if wanted.head == "mean":
        view |= {"view": "text", "set": ",".join(map(str, range(heads)))}
    elif wanted.head is not None:
        view["head"] = _head(wanted.head, heads)
    if wanted.token is not None:
        of = atlas[place]
        keys = [clean(key) for key in of.keys or map(str, range(1, K + 1))]
        rows = keys[K - Q :] if Q <= K else map(str, range(1, Q + 1))
        queries = [clean(query) for query in of.queries or rows]
        query, key = placed(subject, wanted, keys, queries)
        view |= {"view": "text", "token": key if query is None else query}
        if query is None:
            view["direction"] = "seen"
    return urlencode(view, safe=",")


def _settled(subject: Subject, atlas: Atlas, wanted: ViewOptions) -> ViewOptions:
    """The layer and head that are meant, where the command named neither."""
    if wanted.layer is not None or wanted.head is not None:
        named = chosen_head(subject, wanted, None)
        return named if wanted.head is not None else ViewOptions(named.layer, None, wanted.token)
    if subject.told.heads:
        _, path, head = subject.told.heads[0]
        return replace(wanted, layer=path, head=str(head))
    if isinstance(subject.what, Trace) or max(max(m.shape[1:]) for m in atlas.maps) > SHORT:
        return wanted
    if atlas.summaries:
        # Where layers are without traces, the sharpest head is not known: the first with them.
        layers = subject.what.values()
        first = next(i for i, layer in enumerate(layers) if len(layer.traces))
        return replace(wanted, layer=str(first))
    return chosen_head(subject, wanted, head_figures(subject.what))


def _map(what: Trace | Seen, atlas: Atlas, layer: str) -> int:
    if isinstance(what, Trace):
        if layer != "0":
            raise RegardError("there is only one layer", got=f"--layer {layer}", accepted="0")
        return 0
    path = layer_of(what, layer)[1].path or "(model)"
    places = [i for i, m in enumerate(atlas.maps) if m.name in (path, f"{path} · 1")]
    if not places:
        raise refuse_places(f"--layer {layer}")
    return places[0]


def _head(head: str, heads: int) -> int:
    if head.removeprefix("-").isdecimal() and -heads <= int(head) < heads:
        return int(head) % heads
    raise RegardError(
        "there is no such head", got=f"--head {head}", accepted=f"0 to {heads - 1}, or mean"
    )
