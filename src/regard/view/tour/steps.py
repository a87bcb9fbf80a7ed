"""The five steps in words: token, query and key, logit, softmax, values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from regard.errors import RegardError
from regard.view.atlas import clean
from regard.view.atlas.maps import Map
from regard.view.tour.pair_numbers import PairNumbers, Vector, pair_numbers
from regard.view.tour.shown_pair import shown_pair

Step = dict[str, Any]
SHOWN = 5
"""Keys that stand in a table: the strongest, and the one that is asked about."""
ALL, NEAR = 48, 10
"""So many tokens are all shown; of more, so many on each side of a pair's two."""
FEW = 128
"""Numbers of a vector that are drawn."""
LARGE = 20.0
"""A sum whose logarithm is larger is written as a power of e."""


def tour(of: Map, head: int, query: int | None = None, key: int | None = None) -> dict[str, Any]:
    """How the weight of a pair comes about, as JSON: five steps, each with a title, words, and
    figures to draw. Where no pair is named, one that shows what the head does.

    >>> import regard, torch
    >>> from regard.view.atlas import Atlas
    >>> x = torch.eye(3) * 2
    >>> told = tour(Atlas.of(regard.trace(x, x, x), ["to", "be", "or"])[0], 0, 1, 1)
    >>> [step["title"] for step in told["steps"]]
    ['Tokens', 'A query meets keys', 'Logits', 'Softmax', 'Values, weighted']
    >>> told["steps"][1]["sum"]
    'q · k = 4'
    """
    if key is None:
        query, key = shown_pair(of, head, query)
    if query is None:
        raise RegardError("a pair is a query and a key", got="a key alone", do="name the query")
    found = pair_numbers(of, head, query, key)
    words = _Words(of, found)
    steps = [_tokens(words), _meeting(words), _logits(words), _softmax(words), _values(words)]
    return {"query": query, "key": key, "share": _at(found.weights, key), "steps": steps}


class _Words:
    """The names of a pair, and the keys that stand beside it."""

    def __init__(self, of: Map, found: PairNumbers) -> None:
        self.of, self.found = of, found
        self.asks = _name(of.queries, found.query)
        self.holds = self.key(found.key)

    def key(self, at: int) -> str:
        return _name(self.of.keys, at)

    @property
    def beside(self) -> list[int]:
        """The strongest keys, and the one that is asked about."""
        n = min(SHOWN, self.found.seen)
        best = self.found.weights.topk(n).indices.tolist()
        own = self.found.key
        return best if own in best or self.masked else [*best[: SHOWN - 1], own]

    @property
    def near(self) -> list[dict[str, Any]]:
        """The keys around those of the pair, in the order of the text."""
        n = self.of.shape[2]
        own, asks = self.found.key, min(self.found.query, n - 1)
        ends = [own, asks if self.of.queries == self.of.keys else own]
        shown = {at for end in ends for at in range(end - NEAR, end + NEAR + 1) if 0 <= at < n}
        if n <= ALL:
            shown = set(range(n))
        kinds = {asks: "asks"} if self.of.queries == self.of.keys else {}
        kinds[own] = "own" if own not in kinds else "asks own"
        return [
            {"at": at, "text": self.key(at)[1:-1] if self.of.keys else "", "kind": kinds.get(at)}
            for at in sorted(shown)
        ]

    @property
    def masked(self) -> bool:
        return _at(self.found.logits, self.found.key) == -math.inf


def _tokens(words: _Words) -> Step:
    found, of = words.found, words.of
    _, Q, K = of.shape
    one = of.queries == of.keys and Q == K
    many = f"{Q} tokens" if one else f"{Q} tokens that look, and {K} that are looked at"
    sees = f"{found.seen} of the {K}" if found.seen < K else f"all {K}"
    return _step(
        "Tokens",
        f"A model reads tokens: words, or pieces of them, each with a place that is counted from 0."
        f" Here there are {many}. {words.asks} at place {found.query} may see {sees}, and gives "
        f"each of them a share of its attention. How large is that of {words.holds} at place "
        f"{found.key}?",
        sum=f"{words.asks} #{found.query} → {words.holds} #{found.key}",
        words=words.near,
    )


def _meeting(words: _Words) -> Step:
    found = words.found
    if found.q is None or found.k is None:
        return _step(
            "A query meets keys",
            "Every token has a query (what it looks for) and a key (by which it is found), and the "
            "two are compared. This trace was made of weights alone: it holds neither.",
        )
    d = len(found.q)
    made = (
        "Of its vector every token makes a query, which says what it looks for, and a key, by which"
        f" it is found. In this head each is {d} numbers. "
    )
    vectors = [_vector(f"q of {words.asks}", found.q), _vector(f"k of {words.holds}", found.k)]
    if found.products is None:
        compared = "This head compares them by something else than a dot product."
        return _step("A query meets keys", made + compared, vectors=vectors)
    both = _vector("q × k", found.q * found.k)
    product = _at(found.products, found.key)
    return _step(
        "A query meets keys",
        f"{made}The query of {words.asks} is held against the key of {words.holds}: number times "
        "number, and all of them added up. The more the two point the same way, the larger it is.",
        sum=f"q · k = {_number(product)}",
        vectors=[*vectors, both],
    )


def _logits(words: _Words) -> Step:
    found = words.found
    logit = _at(found.logits, found.key)
    if words.masked:
        return _step(
            "Logits",
            f"{words.asks} must not see {words.holds}: the pair is masked, and its logit is −∞.",
            sum="logit = −∞",
        )
    if found.products is None or found.q is None:
        told = "The number that softmax is given is called logit."
        less = " Of bare weights it is known but for a constant." if found.q is None else ""
        return _step("Logits", told + less, sum=f"logit = {_number(logit)}")
    product, d = _at(found.products, found.key), len(found.q)
    plain = math.isclose(found.scale, d**-0.5, rel_tol=1e-6)
    by = f"÷ √{d}" if plain else f"× {_number(found.scale)}"
    why = (
        f"q · k adds up {d} products, so it grows with the width of the head. Divided by √{d} = "
        f"{_number(math.sqrt(d))} it is of the same size at any width"
        if plain
        else f"q · k is multiplied by {_number(found.scale)}, the scale of this head"
    )
    scaled = product * found.scale
    total = f"{_number(product)} {by} = {_number(scaled)}"
    after = ""
    if found.changed:
        after = f" Then it is changed ({found.changed}): {_number(logit)}."
    return _step(
        "Logits",
        f"{why}: that is the logit.{after} The other keys have theirs.",
        sum=total,
        table=_table(
            words,
            ["key", "q · k", "logit"],
            lambda at: [_number(_at(found.products, at)), _number(_at(found.logits, at))],
        ),
    )


def _softmax(words: _Words) -> Step:
    found = words.found
    logit, share = _at(found.logits, found.key), _at(found.weights, found.key)
    if words.masked:
        return _step(
            "Softmax",
            "e to the power of −∞ is 0: a masked token gets exactly nothing.",
            sum=f"share = {_percent(0)}",
        )
    part, whole = _power(logit, found.lse), _power(found.lse, found.lse)
    others = found.seen - len(words.beside)
    sink = " A learned sink of this head is in the sum as well." if found.has_sink else ""
    rest = 1 - sum(_at(found.weights, at) for at in words.beside)
    table = _table(
        words,
        ["key", "logit", "exp", "share"],
        lambda at: [
            _number(_at(found.logits, at)),
            _power(_at(found.logits, at), found.lse),
            _percent(_at(found.weights, at)),
        ],
    )
    if others or found.has_sink:
        named = f"{others} more" if others else "the sink"
        table["rows"].append({"cells": [named, "", "", _percent(max(rest, 0.0))]})
    return _step(
        "Softmax",
        f"exp makes every logit a positive number, and large ones much larger. Over all "
        f"{found.seen} that {words.asks} may see they add up to {whole}; of that sum the trace "
        f"keeps the logarithm, lse = {_number(found.lse)}.{sink} What is divided by it adds up "
        f"to {_percent(1)}: these are the weights that every view shows.",
        sum=f"{part} ÷ {whole} = {_percent(share)}",
        table=table,
    )


def _values(words: _Words) -> Step:
    found = words.found
    share = _percent(_at(found.weights, found.key))
    title, made = "Values, weighted", "Every token also has a value, which is what it gives. "
    writes = (
        f"The head adds up the values of all tokens, each times its share: {share} of that of "
        f"{words.holds}. The sum is all that it writes at {words.asks}."
    )
    if found.values is None or found.out is None:
        return _step(title, f"{made}{writes} The values are not in this trace: only their shares.")
    value, out = found.values[found.key], found.out
    part = value * _at(found.weights, found.key)
    return _step(
        title,
        made + writes,
        sum=f"length {_number(value.norm())} × {share} = {_number(part.norm())}",
        vectors=[
            _vector(f"value of {words.holds}", value),
            _vector(f"× {share}", part),
            _vector(f"all together, at {words.asks}", out),
        ],
        table=_table(
            words,
            ["key", "share", "length of the value", "product"],
            lambda at: _weighed(_at(found.weights, at), found.values[at]),
        ),
    )


def _weighed(weight: float, value: Vector) -> list[str]:
    length = float(value.norm())
    return [_percent(weight), _number(length), _number(weight * length)]


def _step(title: str, text: str, **more: Any) -> Step:
    return {"title": title, "text": text, **more}


def _table(words: _Words, header: list[str], cells: Any) -> dict[str, Any]:
    own = words.found.key
    rows = [
        {"cells": [f"{words.key(at)} #{at}", *cells(at)], "own": at == own} for at in words.beside
    ]
    return {"header": header, "rows": rows}


def _vector(name: str, numbers: Vector) -> dict[str, Any]:
    shown = [round(float(n), 4) for n in numbers[:FEW].nan_to_num(0.0)]
    more = f", the first {FEW}" if len(numbers) > FEW else ""
    return {"name": f"{name} ({len(numbers)}{more})", "numbers": shown}


def _name(names: Sequence[str] | None, at: int) -> str:
    if names is None:
        return f"#{at}"
    return f"‘{clean(names[at])[:40]}’"


def _at(row: torch.Tensor | None, at: int) -> float:
    assert row is not None
    return float(row[at])


def _power(logit: float, lse: float) -> str:
    """e to the power of a logit; where the sum is beyond all use, as a power."""
    # A sum that is no number is beyond all use too.
    if not abs(lse) <= LARGE:
        return f"e^{_number(logit)}"
    return _number(math.exp(logit)) if logit > -math.inf else "0"


def _number(value: float | torch.Tensor) -> str:
    """Four digits.

    >>> _number(5.65685), _number(-0.00012346), _number(77824.6)
    ('5.657', '−0.0001235', '77,820')
    """
    digits = f"{float(value):.4g}"
    large = 1e4 <= abs(float(value)) < 1e9
    return (f"{float(digits):,.0f}" if large else digits).replace("-", "−")


def _percent(share: float) -> str:
    """Three digits, and never a power of ten.

    >>> [_percent(share).replace("\xa0", " ") for share in (0.48712, 0.0, 1e-9)]
    ['48.7 %', '0 %', '<0.001 %']
    """
    digits = "<0.001" if 0 < share < 1e-5 else f"{100 * share:.3g}"
    return f"{digits}\xa0%"
