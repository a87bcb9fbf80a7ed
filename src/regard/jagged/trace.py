"""What one call did for sequences of different lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from regard.backends.contract import Top
from regard.errors import RegardError
from regard.jagged.inputs import Sequences
from regard.masks.algebra import Mask
from regard.masks.packed import Packed
from regard.traces import Chosen, Trace
from regard.values import Shape


@dataclass(frozen=True, eq=False, repr=False)
class JaggedTrace(Trace):
    """A trace of jagged inputs: answers are jagged too, and `trace[i]` is a trace of one sequence.
    That of tokens with cu_seqlens answers [tokens, heads, ...].

    Inside it is one trace of all sequences end to end.

    >>> import regard, torch
    >>> x = torch.nested.nested_tensor([torch.randn(n, 2, 4) for n in (3, 5)], layout=torch.jagged)
    >>> x = x.transpose(1, 2)                                   # [B, H, j, D]
    >>> t = regard.trace(x, x, x, mask=regard.masks.causal())
    >>> t.entropy[1].shape, t[1].weights().shape
    (torch.Size([2, 5]), torch.Size([1, 2, 5, 5]))
    """

    sequences: Sequences | None = None

    @property
    def out(self) -> Tensor:
        return self._queries(self.rows.out)

    @property
    def lse(self) -> Tensor:
        return self._queries(self.rows.lse)

    @property
    def max_logit(self) -> Tensor:
        return self._queries(super().max_logit)

    @property
    def entropy(self) -> Tensor:
        return self._queries(self.rows.entropy)

    @property
    def mean_logit(self) -> Tensor:
        return self._queries(super().mean_logit)

    @property
    def std_logit(self) -> Tensor:
        return self._queries(super().std_logit)

    @property
    def min_logit(self) -> Tensor:
        return self._queries(super().min_logit)

    def received(self) -> Tensor:
        return self._sequences.keys.of(super().received())

    def top(self, n: int) -> Top:
        found = super().top(n)
        queries, keys = self._sequences
        device = found.indices.device
        starts, lengths = (torch.tensor(n, device=device) for n in (keys.ends, queries.lengths))
        first = starts[:-1].repeat_interleave(lengths, output_size=queries.ends[-1])[:, None]
        indices = torch.where(found.indices < 0, found.indices, found.indices - first)
        return Top(self._queries(found.values), self._queries(indices))

    def weights(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("weights")

    def logits(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("logits")

    def mass(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("mass")

    def recall(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("recall")

    def indexer_target(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("indexer_target")

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("save")

    def map(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("map")

    def __len__(self) -> int:
        return len(self._sequences.queries)

    def __iter__(self) -> Iterator[Trace]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, which: Chosen | tuple[Chosen, ...]) -> Trace:
        """The trace of one sequence, or of some of its heads."""
        i, *heads = which if isinstance(which, tuple) else (which,)
        n = len(self)
        if not isinstance(i, int) or not -n <= i < n or len(heads) > 1:
            raise RegardError(
                "a jagged trace gives one sequence at a time",
                got=f"trace[{which!r}]",
                accepted=f"trace[i] or trace[i, heads] with i from -{n} to {n - 1}",
            )
        one = self._one(i % n)
        return one[:, heads[0]] if heads else one

    def _one(self, i: int) -> Trace:
        x, packed = self.inputs, self._sequences
        (q0, q1), (k0, k1) = (ragged.ends[i : i + 2] for ragged in packed)
        mask = self._mask_of(i, q1 - q0, k1 - k0) if isinstance(x.mask, Packed) else x.mask
        inputs = replace(
            x,
            q=x.q[:, :, q0:q1],
            k=x.k[:, :, k0:k1],
            v=x.v[:, :, k0:k1],
            mask=mask,
            rank=4 if packed.queries.heads else 3,
        )
        rows = self.rows.map(lambda t: t[:, :, q0:q1])
        return Trace(inputs, rows, self.backend, self.second_pass, self.mask)

    def _mask_of(self, i: int, queries: int, keys: int) -> Mask | None:
        """The bound mask of one of several sequences."""
        packed, device = self.inputs.mask, self.inputs.q.device
        assert isinstance(packed, Packed)
        if packed.mask is None:
            return None
        assert self.mask is not None
        if queries != keys and not self.mask.tensors():
            return self.mask.bind(Shape(1, self.inputs.shape.H, queries, keys), device)
        inner = packed.mask.select(torch.tensor([i], device=device), slice(None))
        if queries == keys:
            return inner
        # Its tensors speak of all sequences, and it of places among the keys.
        return Packed(inner, *(torch.tensor([n], device=device) for n in (queries, keys)))

    def _queries(self, answer: Tensor) -> Tensor:
        return self._sequences.queries.of(answer)

    @property
    def _sequences(self) -> Sequences:
        assert self.sequences is not None
        return self.sequences

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """Which sequence to draw is not known; `trace[i]` shows one."""
        return {"text/plain": repr(self)}

    def _display_(self) -> object:
        return repr(self)

    def _refuse(self, question: str) -> NoReturn:
        raise RegardError(
            f"{question} speaks of places, and these sequences have different lengths",
            got=f"{len(self)} sequences",
            accepted="this question about one sequence",
            do=f"trace[i].{question}(...)",
        )

    def __repr__(self) -> str:
        lengths = self._sequences.queries.lengths
        few, many = min(lengths, default=0), max(lengths, default=0)
        H, G = self.inputs.shape.H, self.inputs.k.shape[1]
        heads = f"heads {H}" if G == H else f"heads {H} over {G}"
        dtype = str(self.inputs.q.dtype).removeprefix("torch.")
        mask = "" if self.mask is None else f", mask={self.mask!r}"
        x = self.inputs.q
        return (
            f"JaggedTrace({len(self)} sequences of {few} to {many} queries, {heads}, width "
            f"{x.shape[-1]}, {dtype} on {x.device}{mask}, by {self.backend})"
        )
