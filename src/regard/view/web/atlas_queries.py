"""What a front end may ask of an atlas: each question has a name, words and an answer in bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch

from regard.cancellation import stoppable
from regard.errors import RegardError
from regard.view.atlas import Atlas, CancelledError, Go, head_badges, one_core, tile, to_bytes
from regard.view.tour import tour
from regard.view.web.html_page import document
from regard.view.web.priority_lock import PriorityLock

Asked = Mapping[str, str]
JSON, BYTES = "application/json", "application/octet-stream"
TOLD = ("index", "statistics", "badges", "cell", "pairs", "tour")
"""Questions that are answered in JSON, and not in numbers."""
PATIENT = ("page", "statistics", "badges", "pairs", "figure")
"""Questions that take long, and give way to others; and tiles that are read in full."""
MOST_PAIRS = 100
OFTEN = 0.05
"""Seconds between two looks at whether an answer is still wanted, at least."""


class Answers:
    """Answers questions about an atlas, one at a time, and beside it one that takes long: it pauses
    between two steps while others are answered.

    >>> import regard, torch
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> answers = Answers(Atlas.of(regard.trace(x, x, x)))
    >>> answers.answer("cell", {"map": "0", "head": "0", "query": "3", "key": "1"})
    ('application/json', b'{"weight": 0.25, "rank": 1}')
    """

    def __init__(self, atlas: Atlas) -> None:
        self.atlas = atlas
        self._turns = PriorityLock()
        self._statistics: dict[int, bytes] = {}
        self._badges: dict[int, bytes] = {}

    def answer(
        self, name: str, asked: Asked, go: Callable[[], bool] = lambda: True
    ) -> tuple[str, bytes]:
        """The kind and the bytes of an answer. `go` says whether it is still wanted."""
        question = self.QUESTIONS.get(name)
        if question is None:
            raise RegardError(
                "there is no such question", got=repr(name), accepted=", ".join(self.QUESTIONS)
            )
        urgent = name not in PATIENT and "exact" not in asked
        check = sometimes(go) if urgent else self._giving_way(go)
        try:
            with self._turns.taken(urgent=urgent), stoppable(check):
                # Others were answered meanwhile.
                check()
                found = question(self, asked, self._pausing(go, urgent))
        except KeyError as error:
            raise RegardError(f"{name} was asked without {error}") from None
        except RegardError:
            raise
        except ValueError as error:
            raise RegardError(f"{name} has an argument that cannot be read: {error}") from None
        return (JSON if name in TOLD else BYTES), found

    def _giving_way(self, go: Callable[[], bool]) -> Callable[[], None]:
        """Between two steps of a long request, all waiting short requests are answered."""
        often = sometimes(go)

        def check() -> None:
            often()
            if self._turns.wanted:
                self._turns.give(urgent=False)
                self._turns.take(urgent=False)

        return check

    def _pausing(self, go: Callable[[], bool], urgent: bool) -> Go:
        def pause(done: float) -> bool:
            with self._turns.rested(urgent=urgent):
                return go()

        return pause

    @cached_property
    def _known(self) -> bytes:
        return json.dumps(self.atlas.index()).encode()

    def _index(self, asked: Asked, go: Go) -> bytes:
        return self._known

    def _statistics_of(self, asked: Asked, go: Go) -> bytes:
        place = int(asked["map"])
        if place not in self._statistics:
            self._statistics[place] = json.dumps(self.atlas[place].statistics()).encode()
        return self._statistics[place]

    def _badges_of(self, asked: Asked, go: Go) -> bytes:
        place = int(asked["map"])
        if place not in self._badges:
            self._badges[place] = json.dumps(head_badges(self.atlas[place])).encode()
        return self._badges[place]

    def _largest(self, asked: Asked, go: Go) -> bytes:
        return to_bytes(self.atlas[int(asked["map"])].largest(int(asked["head"])))

    def _visible(self, asked: Asked, go: Go) -> bytes:
        return to_bytes(self.atlas[int(asked["map"])].visible)

    def _tile(self, asked: Asked, go: Go) -> bytes:
        of = self.atlas[int(asked["map"])]
        place = (int(asked[name]) for name in ("head", "level", "row", "column"))
        quantity = asked.get("quantity", "weight")
        return tile(of, *place, quantity=quantity, exact="exact" in asked, go=go)

    def _row(self, asked: Asked, go: Go) -> bytes:
        K = self.atlas[int(asked["map"])].shape[2]
        query = int(asked["query"])
        return self._line(asked, range(query, query + 1), range(K), go)

    def _column(self, asked: Asked, go: Go) -> bytes:
        Q = self.atlas[int(asked["map"])].shape[1]
        key = int(asked["key"])
        return self._line(asked, range(Q), range(key, key + 1), go)

    @one_core()
    def _line(self, asked: Asked, queries: range, keys: range, go: Go) -> bytes:
        """One row or column of the map, the mean over some heads."""
        of = self.atlas[int(asked["map"])]
        heads = [int(head) for head in asked["heads"].split(",")]
        if len(set(heads)) < len(heads):
            raise RegardError("each head is asked for once", got=asked["heads"][:80])
        total = torch.zeros(len(queries) * len(keys))
        for done, head in enumerate(heads):
            if not go(done / len(heads)):
                raise CancelledError
            total += of.weights(head, queries, keys).flatten().nan_to_num(0.0)
        return to_bytes(total / len(heads))

    @one_core()
    def _cell(self, asked: Asked, go: Go) -> bytes:
        of = self.atlas[int(asked["map"])]
        head, query, key = (int(asked[name]) for name in ("head", "query", "key"))
        K = of.shape[2]
        if not 0 <= key < K:
            raise RegardError("there is no such key", got=str(key), accepted=f"0 to {K - 1}")
        quantity = asked.get("quantity", "weight")
        row = of.weights(head, range(query, query + 1), range(K), quantity)[0].nan_to_num(0.0)
        rank = 1 + int((row > row[key]).sum())
        return json.dumps({"weight": float(row[key]), "rank": rank}).encode()

    @one_core()
    def _pairs(self, asked: Asked, go: Go) -> bytes:
        """The strongest pairs of a head."""
        head, count, first = (int(asked[name]) for name in ("head", "count", "first"))
        if not (0 < count <= MOST_PAIRS and 0 <= first <= 1):
            raise RegardError(
                "pairs are counted, and the first key is set aside or not",
                got=f"count={count}, first={first}",
                accepted=f"1 to {MOST_PAIRS}; 0 or 1",
            )
        found = self.atlas[int(asked["map"])].strongest_pairs(head, count, first)
        names = ("query", "key", "weight")
        return json.dumps([dict(zip(names, pair, strict=True)) for pair in found]).encode()

    @one_core()
    def _tour(self, asked: Asked, go: Go) -> bytes:
        pair = [int(asked[name]) if name in asked else None for name in ("query", "key")]
        return json.dumps(tour(self.atlas[int(asked["map"])], int(asked["head"]), *pair)).encode()

    @one_core()
    def _figure(self, asked: Asked, go: Go) -> bytes:
        """A head as a PDF."""
        # Imported late: matplotlib may not be there, which is said then.
        from regard.view.pictures.map_figure import pdf

        return pdf(self.atlas, int(asked["map"]), int(asked["head"]))

    def _page(self, asked: Asked, go: Go) -> bytes:
        """Everything as one HTML file."""

        def progress(done: int, total: int) -> None:
            if not go(done / total):
                raise CancelledError

        return document(self.atlas, progress=progress).encode()

    QUESTIONS: ClassVar[dict[str, Callable[[Any, Asked, Go], bytes]]] = {
        "index": _index,
        "statistics": _statistics_of,
        "badges": _badges_of,
        "largest": _largest,
        "visible": _visible,
        "tile": _tile,
        "row": _row,
        "column": _column,
        "cell": _cell,
        "pairs": _pairs,
        "tour": _tour,
        "figure": _figure,
        "page": _page,
    }


def sometimes(go: Callable[[], bool]) -> Callable[[], None]:
    """Stops work whose client is gone; checked at intervals, because a check takes longer than some
    steps."""
    after = 0.0

    def check() -> None:
        nonlocal after
        now = time.monotonic()
        if now >= after:
            after = now + OFTEN
            if not go():
                raise CancelledError

    return check
