"""Which heads link one word to another, and how surprising that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.errors import RegardError
from regard.interpret.head_scores.links.link_table import Link, Links
from regard.interpret.head_scores.links.word_places import Found, places_of
from regard.interpret.head_scores.pairs.weight_blocks import blocks, open_pairs
from regard.interpret.head_scores.texts.text_batches import Texts
from regard.interpret.interventions.runs import Runner
from regard.interpret.rows import matching
from regard.traces import Trace

DRAWS = 20_000


@dataclass(eq=False)
class _Given:
    """What the heads of a layer give from one word to another, text by text."""

    shares: list[Float[Tensor, "h"]] = field(default_factory=list)
    usual: list[Float[Tensor, "h"]] = field(default_factory=list)
    uniform: list[float] = field(default_factory=list)
    others: list[Float[Tensor, "n h"]] = field(default_factory=list)
    """What the same rows give to other places, as many tokens at a time as the word has."""


def links_of(
    texts: Texts, links: Sequence[Any], layers: str | Sequence[str] = "*", seed: int = 0
) -> Links:
    """Heads by what they give from one word to another, in the texts where both stand."""
    rows: list[Link] = []
    notes: list[str] = []
    for pair in links:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise RegardError(
                "a link is a pair: the word that looks, and the word that is looked at",
                got=repr(pair)[:60],
                accepted='("it", "animal")',
            )
        said = f"{_shown(pair[0])} → {_shown(pair[1])}"
        where, told = _where(texts, pair, said)
        notes += told
        given: dict[str, _Given] = {}
        for text, query, key in where:
            _look(texts, text, query.places, key.places, given)
        chosen = matching(given, layers)
        rows += _ranked(said, {path: given[path] for path in chosen}, seed)
        if len(where) == 1:
            least = min(row.p for row in rows if row.link == said)
            notes.append(f"{said}: of one text p is never below {least:.2g}; give more")
    return Links(tuple(rows), tuple(notes))


def _where(
    texts: Texts, pair: Sequence[Any], said: str
) -> tuple[list[tuple[int, Found, Found]], list[str]]:
    """The texts that contain both words, and notes for the reader."""
    found, absent, several = [], 0, 0
    for i, sides in enumerate(texts.sides):
        tokens = None if texts.reader is None or sides[0].ids is None else texts.spelled(i)
        query, key = (places_of(word, tokens, sides[0].places) for word in pair)
        if not query.places or not key.places:
            absent += 1
            continue
        both = zip(pair, (query, key), strict=True)
        several += any(isinstance(word, str) and at.times > 1 for word, at in both)
        found.append((i, query, key))
    if not found:
        raise RegardError(
            "the words of a link do not stand in any text together",
            got=said,
            accepted="words as the texts write them; a number of an occurrence that there is",
            do="see the tokens: reader.read(text)",
        )
    notes = []
    if absent:
        notes.append(f"{said}: not in {absent} of {len(texts.calls)} texts, which are left out")
    if several:
        notes.append(
            f"{said}: a word stands more than once in {several} of the texts; the first is meant, "
            '("it", 2) is the second'
        )
    return found, notes


def _look(
    texts: Texts, text: int, queries: list[int], keys: list[int], given: dict[str, _Given]
) -> None:
    def look(place: tuple[str, int], trace: Trace) -> None:
        x = trace.inputs
        if texts.sides[text][0].places != x.shape.Q or x.shape.K != x.shape.Q:
            return
        into = given.setdefault(place[0], _Given())
        seen = open_pairs(
            x, torch.tensor(queries, device=x.q.device), torch.arange(x.shape.K, device=x.q.device)
        )[0].any(0)
        weights = trace.detach()[0].weights(queries=queries)[0].double().cpu()
        seen = seen.cpu()
        into.shares.append(weights[..., keys].sum(-1).mean(-1))
        alike = seen / seen.sum(-1, keepdim=True).clamp_min(1)
        into.uniform.append(float(alike[:, keys].sum(-1).mean()))
        into.others.append(_others(weights, seen, queries, keys))
        into.usual.append(_usual(trace.detach()[0], queries, keys))

    Runner(texts.model).run(texts.calls[text], look=look)


def _others(
    weights: Float[Tensor, "h q k"], seen: Bool[Tensor, "q k"], queries: list[int], keys: list[int]
) -> Float[Tensor, "n h"]:
    """What the rows give to other places: runs of as many tokens as the word has, all seen by all
    of the rows, that do not touch the word."""
    K, many = seen.shape[1], len(keys)
    whole = seen.all(0)
    found = [
        weights[..., start : start + many].sum(-1).mean(-1)
        for start in range(K - many + 1)
        if bool(whole[start : start + many].all()) and not {*range(start, start + many)} & {*keys}
    ]
    return torch.stack(found) if found else weights.new_zeros(0, len(weights))


def _usual(trace: Trace, queries: list[int], keys: list[int]) -> Float[Tensor, "h"]:
    """What a head gives, over all rows, as far away as the word is."""
    spans = sorted({q - k for q in queries for k in keys})
    total: dict[int, Tensor] = {}
    rows: dict[int, int] = {}
    for q, k, w in blocks(trace):
        seen = open_pairs(trace.inputs, q, k)[0].any(0)
        for span in spans:
            diagonal = int(q[0]) - int(k[0]) - span
            if -len(q) < diagonal < len(k):
                total[span] = total.get(span, 0) + w[0].diagonal(diagonal, 1, 2).sum(-1)
                rows[span] = rows.get(span, 0) + int(seen.diagonal(diagonal).sum())
    means = {span: total[span].double().cpu() / max(rows[span], 1) for span in total}
    nothing = torch.zeros(trace.inputs.shape.H, dtype=torch.float64)
    given = [torch.stack([means.get(q - k, nothing) for k in keys]).sum(0) for q in queries]
    return torch.stack(given).mean(0)


def _ranked(said: str, given: dict[str, _Given], seed: int) -> list[Link]:
    """All heads for one link, most first, with p corrected for how many they are."""
    rows: list[Link] = []
    for layer, (path, one) in enumerate(given.items()):
        shares = torch.stack(one.shares)
        share, usual = shares.mean(0), torch.stack(one.usual).mean(0)
        uniform = sum(one.uniform) / len(one.uniform)
        p, z = _surprise(shares, one.others, seed)
        rows += [
            Link(said, layer, head, path, float(share[head]), float(usual[head]), uniform,
                 float(z[head]), float(p[head]), math.nan, len(shares))
            for head in range(shares.shape[1])
        ]  # fmt: skip
    corrected = holm([row.p for row in rows])
    rows = [replace(row, p_corrected=c) for row, c in zip(rows, corrected, strict=True)]
    return sorted(rows, key=lambda row: -row.share)


def _surprise(
    shares: Float[Tensor, "t h"], others: list[Float[Tensor, "n h"]], seed: int
) -> tuple[Float[Tensor, "h"], Float[Tensor, "h"]]:
    """How often as much goes, on average over texts, to places drawn from the same rows; and how
    many standard deviations of that mean the share is above it. The word is among the places."""
    generator = torch.Generator().manual_seed(seed)
    every = [torch.cat([o, s[None]]) for o, s in zip(others, shares, strict=True)]
    if len(every) == 1:
        drawn = every[0]
    else:
        picked = [torch.randint(len(e), (DRAWS,), generator=generator) for e in every]
        drawn = sum((e[at] for e, at in zip(every, picked, strict=True)), torch.zeros(())) / len(
            every
        )
        drawn = torch.cat([drawn, shares.mean(0)[None]])
    share = shares.mean(0)
    p = (drawn >= share - 1e-12).double().mean(0)
    alone = [o if len(o) else s[None] for o, s in zip(others, shares, strict=True)]
    mean = torch.stack([o.mean(0) for o in alone]).mean(0)
    variance = torch.stack([o.var(0, correction=0) for o in alone]).sum(0) / len(alone) ** 2
    z = torch.where(variance > 0, (share - mean) / variance.sqrt(), 0.0)
    return p, z


def holm(p: Sequence[float]) -> list[float]:
    """p-values of several tests, such that any is below 5 % by luck in 5 % of cases only.

    >>> holm([0.01, 0.5, 0.02])
    [0.03, 0.5, 0.04]
    """
    order = sorted(range(len(p)), key=lambda i: p[i])
    found, most = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        most = max(most, min(1.0, p[i] * (len(p) - rank)))
        found[i] = most
    return found


def _shown(word: Any) -> str:
    if isinstance(word, (tuple, list)) and len(word) == 2 and isinstance(word[0], str):
        return f"{word[0]} ({word[1]})"
    return str(word)
