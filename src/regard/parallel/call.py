"""One call across ranks, checked: what this rank has of it, and what all ranks know."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.backends.contract import Pool, SecondPass, Top
from regard.backends.tiled.second_pass import ChosenBlocks, KeyBlocks
from regard.biases.bias import Bias
from regard.errors import RegardError
from regard.inputs import AttentionInputs, check, check_kinds
from regard.masks.algebra import Mask
from regard.parallel.layout import Layout, contiguous
from regard.parallel.ranks import Ranks
from regard.scores.score import Score
from regard.values import Shape


@dataclass(frozen=True)
class Call:
    """What this rank has of a call, with mask and bias bound to the whole of it."""

    inputs: AttentionInputs
    """Queries, keys and values of this rank, as the comparison wants them."""
    ranks: Ranks
    layout: Layout
    key_layout: Layout

    @property
    def shape(self) -> Shape:
        """The lengths of the whole call."""
        B, H, _, _ = self.inputs.shape
        return Shape(B, H, self.layout.length, self.key_layout.length)


@runtime_checkable
class Part(Protocol):
    """What a rank worked on, with the names of a `Trace`: some heads, or some queries."""

    @property
    def backend(self) -> str: ...
    @property
    def second_pass(self) -> SecondPass: ...
    @property
    def out(self) -> Float[Tensor, "b h n e"]: ...
    @property
    def lse(self) -> Float[Tensor, "b h n"]: ...
    @property
    def max_logit(self) -> Float[Tensor, "b h n"]: ...
    @property
    def entropy(self) -> Float[Tensor, "b h n"]: ...
    @property
    def mean_logit(self) -> Float[Tensor, "b h n"]: ...
    @property
    def std_logit(self) -> Float[Tensor, "b h n"]: ...
    @property
    def min_logit(self) -> Float[Tensor, "b h n"]: ...
    def top(self, n: int) -> Top: ...
    def mass(self, keys: Any) -> Float[Tensor, "b h n"]: ...
    def detach(self) -> Part: ...


P = TypeVar("P")


@runtime_checkable
class Method(Protocol[P]):
    """A way to share a call: what each rank works on, and how answers get to the ranks whose tokens
    they are about."""

    name: str

    def check(self, backend: str | None, *, statistics: bool) -> None:
        """Refuse a backend that cannot run what this rank works on, before anything travels."""
        ...

    def attend(self, backend: str | None) -> Tensor:
        """The output for this rank's queries."""
        ...

    def observe(self, backend: str | None) -> P:
        """What this rank worked on, to be asked."""
        ...

    def of_rows(self, *answers: Tensor) -> tuple[Tensor, ...]:
        """Answers about the queries of the part, one for each, as those of this rank's queries."""
        ...

    def received(self, part: P) -> Tensor:
        """What the keys of this rank received."""
        ...

    def chosen(
        self,
        part: P,
        question: str,
        queries: Int[Tensor, "q"],
        keys: Int[Tensor, "k"],
        heads: Int[Tensor, "h"],
    ) -> Tensor:
        """Weights or logits of chosen queries, keys and heads, on every rank."""
        ...

    def pooled(
        self,
        part: P,
        cells: tuple[int, int],
        queries: tuple[int, int],
        keys: tuple[int, int],
        pool: Pool,
    ) -> Tensor:
        """A map, on every rank."""
        ...

    def kept(self, part: P, blocks: ChosenBlocks) -> Tensor:
        """What of this rank's rows falls on blocks that are kept."""
        ...

    def head_sums(self, part: P, blocks: KeyBlocks, queries: tuple[int, int]) -> Tensor:
        """The weights of all heads together, of this rank's queries in a region, by key block."""
        ...


def checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: Ranks,
    layout: Layout | None,
    key_layout: Layout | None,
    *,
    mask: Mask | None,
    score: Score | None,
    bias: Bias | None,
    softcap: float | None,
    sink: Tensor | None,
    scale: float | None,
    dropout: float,
    training: bool,
    cu_seqlens: Any,
) -> Call:
    """A call of this rank, or the reason why it cannot be."""
    _refuse_others(q, k, v, cu_seqlens)
    if dropout and training:
        raise RegardError(
            "regard.parallel has no dropout: ranks would have to draw the same numbers",
            got=f"dropout={dropout}, training=True",
            accepted="dropout=0.0, or training=False",
            do="drop from what attention gives, with torch.nn.Dropout",
        )
    check_kinds(mask, score, bias)
    x = check(
        q, k, v, mask=None, score=score, bias=None, softcap=softcap, sink=sink, scale=scale,
        dropout=dropout, training=False,
    )  # fmt: skip
    B, H, Q, K = x.shape
    for each in (layout, key_layout):
        if each is not None and not isinstance(each, Layout):
            raise RegardError(
                "layout= says which tokens each rank has",
                got=type(each).__name__,
                accepted="parallel.contiguous(length, ranks), parallel.zigzag(length, ranks) or "
                "parallel.by_document(lengths, ranks)",
            )
    if key_layout is None:
        shared = layout is not None or Q == K
        key_layout = layout if shared else contiguous(K * ranks.size, ranks.size)
    layout = layout or contiguous(Q * ranks.size, ranks.size)
    key_layout = key_layout or layout
    for each, t, name in ((layout, q, "q"), (key_layout, k, "k")):
        each.check(ranks.rank, ranks.size, t.shape[2], f"{name} {list(t.shape)}")
    shape, device = Shape(B, H, layout.length, key_layout.length), x.q.device
    for t in [] if bias is None else bias.tensors():
        if t.device != device:
            raise RegardError(
                "bias= lives on another device",
                got=f"{t.device}, while q is on {device}",
                do=f"move it first: bias.to({str(device)!r})",
            )
    x = replace(
        x,
        mask=None if mask is None else mask.bind(shape, device),
        bias=None if bias is None else bias.bind(shape, device).computed_in(x.compute_dtype),
    )
    return Call(x, ranks, layout, key_layout)


def _refuse_others(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            continue
        if t.is_nested or cu_seqlens is not None:
            raise RegardError(
                "regard.parallel has no jagged sequences",
                got="cu_seqlens" if cu_seqlens is not None else f"{name} as a nested tensor",
                accepted="tensors [B, H, tokens of this rank, D]",
                do="pack the sequences into one with masks.documents(ids) and "
                "parallel.by_document(lengths, ranks)",
            )
        if type(t) not in (Tensor, torch.nn.Parameter):
            raise RegardError(
                f"{name} is a {type(t).__name__}",
                accepted="the plain tensor of this rank, and layout= for where its tokens stand",
                do=f"{name}.to_local() for a DTensor whose shards are those of the layout",
            )
        if t.ndim != 4:
            raise RegardError(
                "regard.parallel takes tensors with four axes",
                got=f"{name} {list(t.shape)}",
                accepted="[B, H, tokens of this rank, D]",
            )
