"""What becomes of a metric when tokens may not look at others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal

from torch import nn

from regard.errors import RegardError
from regard.interpret.interventions.edges import (
    Cut,
    Edges,
    Softmax,
    listed,
    named,
    refuse_ends_in_padding,
)
from regard.interpret.interventions.effects import Effects
from regard.interpret.interventions.experiment import (
    Clean,
    Experiment,
    Metrics,
    Planned,
    Progress,
    heads_named,
)
from regard.interpret.interventions.intervention import Heads
from regard.interpret.rows import matching, numbered
from regard.masks.algebra import Mask

Each = Literal["layer", "head"]


def knock_out(
    model: nn.Module,
    texts: Any,
    metric: Metrics,
    edges: Edges | Sequence[Edges] | Callable[[Any], Sequence[Edges]],
    *,
    heads: Sequence[Sequence[int]] | None = None,
    layers: str | Sequence[str] = "*",
    softmax: Softmax = "before",
    each: Each | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> Effects:
    """What a metric becomes when edges are cut: these tokens may not look at those.

    An edge is (query, key): places, ranges or lists of them, negative ones from the end, None for
    all. (Negative ones are refused where the end of a text is padding.) A list of edges has one row
    in the table for each; a list inside the list is cut together; a mask of `regard.masks` cuts the
    pairs that it allows. A function gives the edges of a text, if they differ between texts.
    `texts` and `metric` are as in `ablate`.

    They are cut in all heads of the layers whose path matches `layers`, or in those of `heads`, all
    at once, or with `each` in one layer or one head after the other. `softmax="before"` hides the
    pair, and the row looks elsewhere instead; `softmax="after"` leaves all weights as they are, and
    removes what was read from that key.

    >>> import torch
    >>> from regard import interpret
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    >>> texts = [torch.randn(1, 5, 16) for _ in range(8)]
    >>> metric = lambda output: output[:, -1, 0]
    >>> [row.what for row in interpret.knock_out(model, texts, metric, [(-1, 0), (-1, 1)])]
    ['-1 → 0', '-1 → 1']
    """
    if softmax not in ("before", "after"):
        raise RegardError(
            "softmax= says on which side of it edges are cut",
            got=repr(softmax),
            accepted='"before" (the rest renormalises) or "after" (the value is removed)',
        )
    if each not in (None, "layer", "head"):
        raise RegardError(
            "each= says what edges are cut in, one after the other",
            got=repr(each),
            accepted='"layer", "head", or None for all at once',
        )
    experiment = Experiment(model, texts, metric, batch, progress)

    def plan(i: int, text: Any, clean: Clean) -> list[Planned]:
        cuts = apart(edges(text) if callable(edges) else edges)
        for one in cuts:
            if not isinstance(one, Mask):
                refuse_ends_in_padding(text, *chain.from_iterable(listed(one)))
        planned = []
        for where in _where(clean, layers, heads, each):
            place = "" if each is None else f"{_named(where, each)}: "
            planned += [
                Planned(place + named(one), where, [Cut(where, one, softmax)]) for one in cuts
            ]
        return planned

    title = "cut before softmax" if softmax == "before" else "cut after softmax"
    return experiment.run(title, plan, seed=seed)


def apart(edges: Any) -> list[Edges]:
    """Edges that are cut one after the other."""
    several = [edges] if isinstance(edges, (tuple, Mask)) else list(edges)
    if not several:
        raise RegardError("there is no edge to cut", got="none", accepted="a list of (query, key)")
    for one in several:
        if not isinstance(one, Mask):
            listed(one)
    return several


def _where(
    clean: Clean,
    layers: str | Sequence[str],
    heads: Sequence[Sequence[int]] | None,
    each: Each | None,
) -> list[Heads]:
    sizes = {path: clean.sizes[path] for path in matching(clean.sizes, layers)}
    every = {path: list(range(many)) for path, many in sizes.items()}
    chosen = every if heads is None else numbered(sizes, heads)
    if each is None:
        return [chosen]
    if each == "layer":
        return [{path: some} for path, some in chosen.items()]
    return [{path: [head]} for path, some in chosen.items() for head in some]


def _named(heads: Heads, each: Each) -> str:
    return heads_named(heads) if each == "head" else next(iter(heads)) or "(model)"
