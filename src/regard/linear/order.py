"""Which masks sums along the sequence can honour.

A running sum can start anew (documents), leave a key out for everybody (padding), be read before it
is complete (causal), and slide along (windows). Tables of pairs it cannot honour.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import RegardError
from regard.masks.algebra import And, Mask
from regard.masks.causal import Causal
from regard.masks.documents import Documents
from regard.masks.padding import Padding
from regard.masks.window import Window
from regard.values import Shape, readable


class Order(NamedTuple):
    """What a mask says to a running sum."""

    causal: bool = False
    lengths: Int[Tensor, "b"] | None = None
    ids: Int[Tensor, "b k"] | None = None
    window: tuple[int, int] | None = None
    """How many keys are seen before a query and after it."""

    def seen(self, keys: int, device: torch.device) -> Bool[Tensor, "b 1 k 1"] | None:
        """Which keys there are, of those that may be padding."""
        if self.lengths is None:
            return None
        places = torch.arange(keys, device=device)
        return (places < self.lengths.to(device)[:, None])[:, None, :, None]

    def runs(self, last: Int[Tensor, "b"] | None) -> Int[Tensor, "b 1 k 1"] | None:
        """The number of each key's document along the sequence. 0 is the one that `last`, the
        document of what came before, belongs to."""
        if self.ids is None:
            return None
        ids = self.ids if last is None else self.ids.expand(len(last), -1)
        if not ids.shape[1]:
            return ids[:, None, :, None]
        first = ids[:, :1] if last is None else last[:, None].to(ids)
        before = torch.cat([first, ids[:, :-1]], 1)
        return (ids != before).cumsum(1)[:, None, :, None]


def order_of(mask: Mask | None, shape: Shape, given: Mask | None) -> Order:
    """What a bound mask says; `given` is the same as the caller wrote it."""
    match mask:
        case None:
            return Order()
        case Causal(offset):
            if shape.Q != shape.K or offset != 0:
                raise RegardError(
                    "linear attention is causal over one sequence only",
                    got=f"{given!r} with {shape.Q} queries and {shape.K} keys",
                    accepted="causal() in self-attention",
                )
            return Order(causal=True)
        case Window(left, right, offset):
            if shape.Q != shape.K or offset != 0:
                raise RegardError(
                    "linear attention has windows over one sequence only",
                    got=f"{given!r} with {shape.Q} queries and {shape.K} keys",
                    accepted="window(left, right) in self-attention",
                )
            left, right = (shape.K if side is None else side for side in (left, right))
            return Order(window=(left, right))
        case Padding(limit) if isinstance(limit, Tensor):
            return Order(lengths=limit)
        case Documents(ids, _):
            _check_documents(ids, shape, given)
            return Order(ids=ids)
        case And(left, right):
            a, b = order_of(left, shape, given), order_of(right, shape, given)
            if not (a.lengths is not None and b.lengths is not None) and not (
                a.ids is not None and b.ids is not None
            ):
                lengths = b.lengths if a.lengths is None else a.lengths
                documents = b.ids if a.ids is None else a.ids
                window = _narrower(a.window, b.window)
                return Order(a.causal or b.causal, lengths, documents, window)
    raise RegardError(
        "linear attention cannot leave out these pairs",
        got=repr(given),
        accepted="causal(), window(left), padding(lengths), documents(ids), or several joined by &",
        do="use regard.attention or nn.MultiHeadAttention for other masks",
    )


def _narrower(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), min(one[1], other[1])


def without_window(order: Order, given: Mask | None, instead: str) -> None:
    """Refuse a window in a call whose past is one sum: it cannot forget single keys."""
    if order.window is not None:
        raise RegardError(
            "a state is one sum of all earlier keys, and cannot drop single ones",
            got=repr(given),
            accepted="causal(), padding(lengths), documents(ids), or several joined by &",
            do=instead,
        )


def _check_documents(ids: Int[Tensor, "b k"], shape: Shape, given: Mask | None) -> None:
    if shape.Q != shape.K:
        raise RegardError(
            "linear attention has documents in self-attention only",
            got=f"{given!r} with {shape.Q} queries and {shape.K} keys",
            accepted="as many queries as keys",
        )
    # An id that comes back would need the sum of its document again.
    changes = (ids[:, 1:] != ids[:, :-1]).sum(1)
    ordered = ids.sort(1).values
    once = changes == (ordered[:, 1:] != ordered[:, :-1]).sum(1)
    if not readable(ids):
        torch._assert_async(once.all(), "linear attention: each document is one run of keys")
    elif not bool(once.all()):
        raise RegardError(
            "linear attention takes documents one after the other",
            got=f"{given!r}, in which a document goes on after another began",
            accepted="ids of which equal ones are side by side",
            do="sort the tokens by document, or use regard.attention",
        )
