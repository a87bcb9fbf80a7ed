"""Which masks a sum that runs along the sequence can honour.

A running sum can start anew (documents), leave a key out for everybody (padding), and be read
before it is complete (causal). It cannot forget one key for one query: that is what windows and
tables of pairs would ask of it.
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
                return Order(a.causal or b.causal, lengths, b.ids if a.ids is None else a.ids)
    raise RegardError(
        "linear attention cannot leave out these pairs",
        got=repr(given),
        accepted="causal(), padding(lengths), documents(ids), or several joined by &",
        do="linear.gated(...), in which what is past fades, or regard.attention: a sum that all "
        "queries share cannot forget single keys"
        if _has_window(mask)
        else "use regard.attention or nn.MultiHeadAttention for other masks",
    )


def _has_window(mask: Mask) -> bool:
    if isinstance(mask, And):
        return _has_window(mask.left) or _has_window(mask.right)
    return isinstance(mask, Window)


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
