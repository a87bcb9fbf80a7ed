"""What linear attention remembers: a sum, however long the sequence was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from regard.arguments import described
from regard.errors import RegardError


@dataclass(repr=False, eq=False)
class State:
    """The memory of one layer while a sequence comes in parts, such as token by token.

    A call that is given one goes on from what it holds, and leaves in it what the next call needs.
    Its size does not depend on how many tokens it has seen.

    >>> import torch
    >>> from regard import linear, masks
    >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
    >>> state = linear.State()
    >>> steps = [
    ...     linear.attention(*(t[:, :, i : i + 1] for t in (q, k, v)), state=state)
    ...     for i in range(10)
    ... ]
    >>> whole = linear.attention(q, k, v, mask=masks.causal())
    >>> torch.allclose(torch.cat(steps, 2), whole, atol=1e-5)
    True
    >>> state
    State(10 tokens, batch 1, heads 2, 8 × 9 numbers each)
    """

    sums: Tensor | None = None
    """[B, G, M, E]: the sum of key-value products; in normalised attention with one more column,
    the sum of keys."""
    shift: Tensor | None = None
    """The logarithm of what the sums are divided by [B, G, 1, 1], where there is such a factor."""
    last: Tensor | None = None
    """The document of the last token [B], where there are documents."""
    tokens: int = 0
    kind: str = ""
    """Which form of attention it is of."""

    def claim(self, kind: str, shape: tuple[int, ...]) -> None:
        """Refuse a state of another form or another layer."""
        if self.sums is None:
            self.kind = kind
        elif self.kind != kind or tuple(self.sums.shape) != shape:
            raise RegardError(
                "this state is of another call",
                got=f"{self!r} of {self.kind} for {kind} with sums {list(shape)}",
                accepted="the state of the same layer and batch",
                do="linear.State() for each layer, and for each new sequence",
            )

    def detach(self) -> State:
        """The same memory, cut from autograd: for training in parts."""
        return self._mapped(lambda t: t.detach())

    def clone(self) -> State:
        """A copy, such as for two continuations of one text."""
        return self._mapped(lambda t: t.clone())

    def select(self, batch: Tensor) -> State:
        """The memory of some batch entries, such as the beams that go on."""
        return self._mapped(lambda t: t[batch])

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> State:
        sums, shift, last = (
            None if t is None else change(t) for t in (self.sums, self.shift, self.last)
        )
        return State(sums, shift, last, self.tokens, self.kind)

    def __repr__(self) -> str:
        if self.sums is None:
            return "State(empty)"
        B, G, M, E = self.sums.shape
        return f"State({self.tokens} tokens, batch {B}, heads {G}, {M} × {E} numbers each)"


def refuse_no_state(state: object) -> None:
    """Unless it is one, or none is given."""
    if state is not None and not isinstance(state, State):
        raise RegardError(
            "state= is the state after earlier tokens",
            got=described(state),
            accepted="linear.State() or None",
        )
