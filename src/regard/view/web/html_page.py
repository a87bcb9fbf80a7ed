"""The page: one HTML file with everything in it, which asks the network for nothing.

It carries one level of tiles, the finest that fits, from which the front end pools coarser ones;
for long texts also the strongest keys of every query, exactly. Of each layer one chunk of bytes,
deflated, little-endian:

    visible      f32[Q]       how many keys each query may see
    of each head
      tiles                   as tiles.py writes them, row by row
      strongest  f16[Q, n]    weights, strongest first, then u16[Q, n], their keys;
                              for short texts only f16[Q], the largest of each query
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import torch

from regard.arguments import path_of
from regard.errors import RegardError
from regard.files import replacing
from regard.seen import Seen, Tokens
from regard.traces import Trace
from regard.view.atlas import (
    SIDE,
    Atlas,
    Map,
    Patches,
    Weights,
    halves,
    head_badges,
    levels,
    on_cores,
    tile,
    to_bytes,
)
from regard.view.tour import tour
from regard.view.web.bundle import script

STRONGEST = 4
MOST_KEYS = 1 << 16
"""The place of a strongest key takes two bytes."""
BASE, EACH = 2_000_000, 800
"""Bytes that the tiles of a page may take: so many, and so many more for each token."""
PICTURED = 25_000_000
"""Bytes that they may take where tokens are patches: a picture is not shaded by means."""

SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>html,body,#regard{{height:100%;margin:0}}</style>
</head>
<body>
<div id="regard"><noscript>This page draws with JavaScript.</noscript></div>
{data}
<script type="text/plain" id="regard-later">{later}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def page(
    what: Trace | Seen | Weights | Atlas,
    path: str | os.PathLike[str],
    tokens: Tokens | None = None,
    *,
    queries: Sequence[str] | None = None,
    batch: int = 0,
    limit: int | None = None,
    view: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write what was seen as one HTML file, which any browser opens from disk.

    `tokens` name the keys, `queries=` the queries of another text; what was seen with a tokenizer
    knows its own. `limit` is about how many bytes the tiles may take: more of them make finer
    cells. `view` is what it shows first, written as the end of its address: "map=3&head=1".
    `progress` is told how many heads are written, of how many.

    >>> import regard, tempfile, torch
    >>> x = torch.randn(1, 2, 5, 4)
    >>> t = regard.trace(x, x, x, mask=regard.masks.causal())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = page(t, f"{folder}/map.html", tokens=["To", " read", " is", " to", " look"])
    ...     made.name, made.stat().st_size < 190_000
    ('map.html', True)
    """
    place = path_of(path)
    atlas = Atlas.of(what, tokens, queries=queries, batch=batch)
    made = document(atlas, limit, progress, view=view)
    with replacing(place) as unfinished:
        unfinished.write_text(made, "utf-8")
    return place


def document(
    atlas: Atlas,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    view: str = "",
) -> str:
    """The text of the page of an atlas."""
    programs = script(), script("later")
    index = atlas.index()
    # A page holds one tile of each place: that of the weights.
    index["quantities"] = index["quantities"][:1]
    index["view"] = view
    index["tour"] = _tour(atlas, view)
    chosen = chosen_levels(atlas, limit)
    total = sum(m.shape[0] for m in atlas.maps)
    done = 0
    blocks = []
    for place, (m, level) in enumerate(zip(atlas.maps, chosen, strict=True)):
        K = m.shape[2]
        strongest = min(STRONGEST, K) if level and K <= MOST_KEYS else 0
        parts = [to_bytes(m.visible)]
        for stored in on_cores(partial(stored_head, m, level, strongest), range(m.shape[0])):
            parts.append(stored)
            done += 1
            if progress is not None:
                progress(done, total)
        name = f"regard-{place}"
        packed = base64.b64encode(zlib.compress(b"".join(parts), 9)).decode()
        blocks.append(f'<script type="application/octet-stream" id="{name}">{packed}</script>')
        index["maps"][place]["page"] = {
            "level": level,
            "strongest": strongest,
            "statistics": m.statistics(),
            "badges": head_badges(m),
            "chunk": name,
        }
    return written(index, blocks, programs, atlas.model)


def _tour(atlas: Atlas, view: str) -> dict[str, Any] | None:
    """How one weight of the head that is shown first comes about: the page cannot work it out."""
    asked = parse_qs(view)

    def place(name: str, n: int) -> int:
        given = asked.get(name, ["0"])[-1]
        return min(int(given), n - 1) if given.isdecimal() else 0

    if not atlas.maps:
        return None
    at = place("map", len(atlas.maps))
    of = atlas[at]
    head = place("head", of.shape[0])
    pair = [part for part in asked.get("picked", [""])[-1].split(",") if part.isdecimal()]
    if len(pair) == 2 and int(pair[0]) < of.shape[1] and int(pair[1]) < of.shape[2]:
        told = tour(of, head, *map(int, pair))
    elif min(of.shape[1:]):
        told = tour(of, head)
    else:
        return None
    return {"map": at, "head": head, **told}


def written(index: dict[str, Any], blocks: list[str], programs: tuple[str, str], model: str) -> str:
    """The document. What is in the index can close no element and start no comment. The later part
    of the program is text until a view asks for it, and may run then."""
    text = json.dumps(index, separators=(",", ":")).replace("<", "\\u003c")
    first, later = (_inline(program) for program in programs)
    policy = (
        f"default-src 'none'; script-src {_digest(first)} {_digest(later)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    about = f'<script type="application/json" id="regard-index">{text}</script>'
    return SHELL.format(
        policy=policy,
        title=html.escape(_whole(f"{model} · regard" if model else "regard")),
        data="\n".join([about, *blocks]),
        script=first,
        later=later,
    )


def _inline(program: str) -> str:
    """A program as it may stand in an element."""
    return program.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _digest(program: str) -> str:
    """By which the page's policy knows a program."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()}'"


def _whole(text: str) -> str:
    """A lone surrogate is no character: it is shown as the mark for one that cannot be. In JSON it
    is spelled, and the front end shows it so.

    >>> _whole("half \\ud800, whole \\U0001f600")
    'half �, whole 😀'
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def chosen_levels(atlas: Atlas, limit: int | None) -> list[int]:
    """The finest level of each map so that all of them fit."""
    longest = max((max(m.shape[1:]) for m in atlas.maps), default=0)
    if limit is not None and limit < 0:
        raise RegardError("limit= counts bytes", got=str(limit), accepted="0 or more")
    room = BASE + EACH * longest if limit is None else limit
    texts = [text for m in atlas.maps for text in (m.keys, m.queries)]
    if limit is None and any(isinstance(text, Patches) for text in texts):
        room = max(room, PICTURED)
    for shift in range(64):
        # Every map is as fine as the others: the same number of pairs in a cell.
        chosen = [min(shift, levels(*m.shape[1:])) for m in atlas.maps]
        if sum(map(size, atlas.maps, chosen)) <= room:
            break
        if all(level == levels(*m.shape[1:]) for m, level in zip(atlas.maps, chosen, strict=True)):
            break
    return chosen


def size(of: Map, level: int) -> float:
    """About how many bytes the tiles of a map take in a page at a level."""
    H, Q, K = of.shape
    share = float(of.visible.sum()) / max(1, Q * K)
    cells = math.ceil(Q / (1 << level)) * math.ceil(K / (1 << level))
    # Two bytes a cell at every level; deflating saves about what base64 costs.
    return 2.0 * H * cells * share


def stored_head(of: Map, level: int, strongest: int, head: int) -> bytes:
    """A head as the page holds it; its tiles are those of one level, read in full."""
    _, Q, K = of.shape
    side = SIDE << level
    tiles = [
        tile(of, head, level, row, column, exact=True)
        for row in range(math.ceil(Q / side))
        for column in range(math.ceil(K / side))
    ]
    if strongest:
        return b"".join([*tiles, strongest_keys(of, head, strongest)])
    return b"".join([*tiles, to_bytes(halves(of.largest(head)))])


def strongest_keys(of: Map, head: int, count: int) -> bytes:
    """The weights and the places of each query's strongest keys."""
    weights, places = of.top(head, count)
    return to_bytes(halves(weights)) + to_bytes(places.to(torch.uint16))
