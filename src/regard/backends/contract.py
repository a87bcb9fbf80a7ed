"""What a backend is.

A backend says why it cannot run a call, or runs it. Looking back (`SecondPass`) is a separate
skill: it needs only the inputs and one log-sum-exp per row, so any backend's trace can be looked
into by any second pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.backends.questions.matching_keys import MatchingKeys
from regard.inputs import AttentionInputs

Pool = Literal["mean", "max", "sum"]

HEAD_SUMS = (
    "rows", "empty", "broken", "max_logit", "entropy", "first", "mean_logit", "room", "sink",
    "output", "non_finite", "infinite",
)  # fmt: skip
"""What `SecondPass.head_sums` gives for a head, in this order: the largest logit, and sums over its
rows. `monitoring/telemetry.py` explains each."""


class Rows(NamedTuple):
    """What one pass over the pairs gives: the output and, when asked, what each row saw."""

    out: Float[Tensor, "b h q e"]
    lse: Float[Tensor, "b h q"]
    max_logit: Float[Tensor, "b h q"]
    entropy: Float[Tensor, "b h q"]

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """Each of them changed, such as cut or moved."""
        return Rows(*map(change, self))

    def at_hand(self) -> tuple[Tensor, ...]:
        """Those that need no computation."""
        return tuple(self)

    def plain(self) -> Rows:
        """The same for whoever only looks: nothing is to be learned from statistics."""
        return self


class Noted(Rows):
    """Rows with the logit of the first key, which every watch needs of every call. Rows made from
    them, such as those of some heads, no longer have it."""

    first: Float[Tensor, "b h q"]


class Weighed(Rows):
    """Rows of a pass that mixed columns of numbers beside the values."""

    columns: Float[Tensor, "b h c"]
    """What all rows of a head have of each column: weights times numbers, added up."""


class Tabled(Rows):
    """Rows whose statistics lie in one tensor, which is split when one of them is asked for. For
    most watched calls they are only summed, and making a tensor for each takes time."""

    table: Float[Tensor, "n b h q"]
    """The largest logit, the entropy and the log-sum-exp of each row, and perhaps the logit of the
    first key."""

    def __new__(cls, out: Tensor, table: Tensor) -> Tabled:
        # As the constructor of named tuples does it, but for its names.
        self = tuple.__new__(cls, (out, table, table, table))
        self.table = table
        return self

    @cached_property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.table.unbind()

    @property
    def lse(self) -> Tensor:
        return self._parts[2]

    @property
    def max_logit(self) -> Tensor:
        return self._parts[0]

    @property
    def entropy(self) -> Tensor:
        return self._parts[1]

    def at_hand(self) -> tuple[Tensor, ...]:
        return self.out, self.table

    def __iter__(self) -> Iterator[Tensor]:
        max_logit, entropy, lse, *_ = self._parts
        return iter((self.out, lse, max_logit, entropy))

    def __getitem__(self, which: Any) -> Any:
        return tuple(self)[which]

    def __reduce__(self) -> Any:
        return Rows, tuple(self)


class LearnedRows(Rows):
    """Rows of which the output learns. Statistics join autograd's graph when one is asked for:
    hardly ever are they part of a loss."""

    found: Rows
    """As the forward pass gave them, the output tied to autograd."""
    joined: Callable[[], Rows]

    def __new__(cls, found: Rows, joined: Callable[[], Rows]) -> LearnedRows:
        # As the constructor of named tuples does it, but for its names.
        self = tuple.__new__(cls, tuple(found))
        self.found, self.joined = found, joined
        return self

    @cached_property
    def _learned(self) -> Rows:
        return self.joined()

    @property
    def lse(self) -> Tensor:
        return self._learned.lse

    @property
    def entropy(self) -> Tensor:
        return self._learned.entropy

    @classmethod
    def _make(cls, rows: Iterable[Tensor]) -> Rows:  # type: ignore[override]
        return Rows(*rows)

    def plain(self) -> Rows:
        return self.found

    def at_hand(self) -> tuple[Tensor, ...]:
        return self.found.at_hand()

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        return Rows(*map(change, self.found if change is Tensor.detach else self))

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.out, self.lse, self.max_logit, self.entropy))

    def __getitem__(self, which: Any) -> Any:
        return tuple(self)[which]

    def __reduce__(self) -> Any:
        return Rows, tuple(self)


def table_step(numbers: int, size: int) -> int:
    """How far the rows of a table are apart, each of so many numbers of a size in bytes: each
    starts where kernels were compiled to find memory, at a multiple of 16 bytes."""
    many = 16 // size
    return (numbers + many - 1) // many * many


def empty_table(like: Tensor, B: int, H: int, Q: int, *, dtype: torch.dtype) -> Tensor:
    """Memory for a table of largest logits, entropies and log-sum-exps."""
    step = table_step(B * H * Q, dtype.itemsize)
    return like.new_empty_strided((3, B, H, Q), (step, H * Q, Q, 1), dtype=dtype)


class LogitSpread(NamedTuple):
    """How far each row's allowed logits are from one another."""

    variance: Float[Tensor, "b h q"]
    """Their mean square distance from their mean; 0 for an empty row."""
    lowest: Float[Tensor, "b h q"]
    """The least of them; inf for an empty row."""


Repeated = Callable[..., Rows | Tensor]
"""A call of a known kind: from q, k and v to what was asked for, the rows or the output alone. One
with dropout may be given its seed as well."""


class Work(NamedTuple):
    """What a backend would do for a call."""

    pairs: int
    """Query-key pairs computed, over all batch entries and heads."""
    scratch: int
    """Bytes held at most, besides inputs and outputs."""
    inner_loop: str = ""
    """What does the work inside a tile, where there is a choice."""


class Top(NamedTuple):
    """The strongest keys of each query; -1 and 0 where a query sees fewer."""

    values: Float[Tensor, "b h q n"]
    indices: Int[Tensor, "b h q n"]


@runtime_checkable
class Backend(Protocol):
    """A way to compute attention."""

    name: str
    observes: bool
    """Whether it can report row statistics at all."""

    def refuses(self, inputs: AttentionInputs, *, statistics: bool) -> list[str]:
        """Every reason why this backend cannot run the call. Empty: it can."""
        ...

    def reserved(self, inputs: AttentionInputs) -> str:
        """Why a call that it can run is left to other backends, unless this one is named. Empty: it
        is not left."""
        ...

    def attend(self, inputs: AttentionInputs) -> Float[Tensor, "b h q e"]:
        """The output."""
        ...

    def observe(self, inputs: AttentionInputs) -> Rows:
        """The output and what each row saw."""
        ...

    def work(self, inputs: AttentionInputs, *, statistics: bool) -> Work:
        """What running the call takes."""
        ...

    def repeated(self, inputs: AttentionInputs, *, statistics: bool) -> Repeated:
        """How calls of the same kind as this one, with other q, k and v, are run. (With a bias, a
        sink or dropout they are kernels of a GPU: see calls/kinds.py.)"""
        ...

    def questions(self) -> SecondPass:
        """Who answers questions about what it observed."""
        ...


def run_again(backend: Backend, inputs: AttentionInputs, *, statistics: bool) -> Repeated:
    """The plain way to repeat a call: the same inputs but for q, k and v."""
    rest = inputs.beside_tensors()
    run = backend.observe if statistics else backend.attend

    def again(q: Tensor, k: Tensor, v: Tensor) -> Rows | Tensor:
        return run(AttentionInputs(q, k, v, *rest))

    return again


@runtime_checkable
class BindsAnew(Protocol):
    """A backend with a short way for calls of one kind, each with a mask and a bias of its own."""

    def bound_anew(
        self, inputs: AttentionInputs, *, statistics: bool
    ) -> Callable[[AttentionInputs], Rows | Tensor] | None:
        """How calls like this one run, once mask and bias are bound; None where there is none."""
        ...


@runtime_checkable
class SecondPass(Protocol):
    """Questions about the weights, answered from the inputs and lse."""

    def __init__(self) -> None:
        # Without one, a protocol puts one into its subclass when that is first made, and a graph
        # that was compiled before is compiled again.
        super().__init__()

    def received(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"]
    ) -> Float[Tensor, "b h k"]: ...

    def mass(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], keys: Int[Tensor, "k"]
    ) -> Float[Tensor, "b h q"]: ...

    def first_logit(self, inputs: AttentionInputs) -> Float[Tensor, "b h q"]:
        """The logit of each query and the first key, without waiting for the device, and without
        gradients."""
        ...

    def top(self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], n: int) -> Top: ...

    def pooled(
        self,
        inputs: AttentionInputs,
        lse: Float[Tensor, "b h q"],
        cells: tuple[int, int],
        queries: tuple[int, int],
        keys: tuple[int, int],
        pool: Pool,
    ) -> Float[Tensor, "b h rows columns"]: ...

    def mean_logit(self, inputs: AttentionInputs) -> Float[Tensor, "b h q"]: ...

    def logit_spread(self, inputs: AttentionInputs) -> LogitSpread:
        """Standard deviation and least logit of each row, from one pass over the pairs."""
        ...

    def head_sums(self, inputs: AttentionInputs, rows: Rows) -> Float[Tensor, "n b h"] | None:
        """The `HEAD_SUMS` of each head, without waiting for the device; None unless that is one
        launch: callers can also add them up with plain operations."""
        return None

    def offset_sums(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], reach: int
    ) -> Float[Tensor, "b h offsets"] | None:
        """What all queries give to the key at each offset, from `reach` places later to as many
        earlier; queries are the last places of the keys. None where adding up weights is as
        fast."""
        return None

    def matching_mass(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], matches: MatchingKeys
    ) -> tuple[Float[Tensor, "b h q"], Bool[Tensor, "b q"]] | None:
        """What each query gives to the keys of the kind that it asks for, and whether it may see
        any. None as above."""
        return None

    def mixes_columns(self, inputs: AttentionInputs) -> bool:
        """Whether `weighed` answers; if not, columns need not be made."""
        return False

    def weighed(self, inputs: AttentionInputs, columns: Float[Tensor, "b h k c"]) -> Weighed | None:
        """The forward pass itself, with columns of numbers of the keys that are mixed by the same
        weights as the values, and rounded as these. None where the sums of what each key received
        are as fast."""
        return None

    def value_forms(
        self,
        inputs: AttentionInputs,
        forms: Float[Tensor, "h e e"],
        vectors: Float[Tensor, "b k inner"],
    ) -> tuple[Float[Tensor, "b h k"], Float[Tensor, "b h k"]] | None:
        """v·S·v of each value under the matrix S of each head, and v·u with vectors u of each key
        and head, as wide as the values. None where plain operations serve."""
        return None

    def logits(
        self,
        inputs: AttentionInputs,
        queries: Int[Tensor, "some_q"],
        keys: Int[Tensor, "some_k"],
    ) -> Float[Tensor, "b h some_q some_k"]: ...

    def weights(
        self,
        inputs: AttentionInputs,
        lse: Float[Tensor, "b h q"],
        queries: Int[Tensor, "some_q"],
        keys: Int[Tensor, "some_k"],
    ) -> Float[Tensor, "b h some_q some_k"]: ...
