"""Answers to questions that were asked before of calls of the same kind: the launches that gave the
first of them, with other addresses. To decide and check everything anew takes a tenth of a
millisecond, and more than that of what a card needs for a long text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

from torch import Tensor

from regard.backends.operator_kinds import keep
from regard.backends.triton.launches.launched import recorded
from regard.backends.triton.replay.steps import Fresh, Step, launch_again, made, steps_of

Memory = Sequence[Tensor]
"""What launches write to: answers, then scratch memory."""


class Answers:
    """How questions were answered, by their kind."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[list[Fresh | None], list[Step]]] = {}

    def given(self, kind: Hashable | None, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """The memory of an answer from other tensors, if one of its kind was given before."""
        known = None if kind is None else self._known.get(kind)
        if known is None:
            return None
        fresh, steps = known
        memory = made(fresh, tensors[0].device)
        launch_again(steps, (*tensors, *memory))
        return memory  # type: ignore[return-value]

    def first(
        self,
        kind: Hashable | None,
        run: Callable[..., Memory],
        tensors: Sequence[Tensor],
        zero: Collection[int] = (),
    ) -> Memory:
        """The memory of an answer, of whose kind others are given so. Some, by place, starts at
        0."""
        if kind is None:
            return run(*tensors)
        # Apart, though they be one: launches tell tensors by which is which.
        apart = [t.detach() for t in tensors]
        with recorded() as launches:
            memory = run(*apart)
        steps = steps_of(launches, apart, memory)
        if steps is not None:
            fresh: list[Fresh | None] = [
                Fresh.like(t, zero=place in zero) for place, t in enumerate(memory)
            ]
            keep(self._known, kind, (fresh, steps))
        return memory
