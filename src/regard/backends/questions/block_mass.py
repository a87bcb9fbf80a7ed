"""How much of the weights falls on blocks of keys: what sparse attention keeps of them, and what an
indexer that chooses blocks learns from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.backends.questions.differentiable import Learned, Question, answer
from regard.backends.tiled.second_pass import BlockMass, ChosenBlocks, KeyBlocks
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.transforms import transformed
from regard.values import Shape, whole

MASS = BlockMass()
Blocks = Bool[Tensor, "*bh query_blocks key_blocks"] | Int[Tensor, "*bh query_blocks many"]


class Recall(NamedTuple):
    """How much of what queries look at a choice of keys keeps, from 0 to 1."""

    rows: Float[Tensor, "*bh q"]
    """Of each query; 1 for one that sees nothing, since nothing is lost."""
    mean: Float[Tensor, "*bh"]
    """Of each head, over its queries that see something."""


def recall(
    x: AttentionInputs, lse: Float[Tensor, "b h q"], blocks: Blocks, size: int | tuple[int, int]
) -> Recall:
    """The share of each row that blocks keep. With a sink, of what falls on keys."""
    chosen = chosen_blocks(x, blocks, size)
    kept = kept_mass(x, lse, chosen)
    on_keys = None if x.sink is None else kept_mass(x, lse, all_blocks(chosen))
    rows, seen = recalled(kept, lse, on_keys)
    many = seen.sum(-1)
    return Recall(x.in_kind(rows), x.in_kind(mean_recall((rows * seen).sum(-1), many)))


def kept_mass(
    x: AttentionInputs, lse: Float[Tensor, "b h q"], chosen: ChosenBlocks
) -> Float[Tensor, "b h q"]:
    """The weights of each row that fall on blocks that are kept, added up. Differentiable."""
    _refuse_transforms("recall()", x, lse)

    def ask(x: AttentionInputs, lse: Tensor) -> tuple[Tensor]:
        return (MASS.kept(x, lse, chosen),)

    def vjp(x: AttentionInputs, lse: Tensor, g: Tensor, *, bias: bool) -> Learned:
        return MASS.pull_kept(x, lse, g, chosen, bias=bias)

    (kept,) = answer(Question("recall()", ask, vjp), x, lse)
    return kept


def all_blocks(chosen: ChosenBlocks) -> ChosenBlocks:
    """The choice of every key."""
    return chosen._replace(kept=torch.ones_like(chosen.kept))


def recalled(
    kept: Float[Tensor, "b h q"],
    lse: Float[Tensor, "b h q"],
    on_keys: Float[Tensor, "b h q"] | None,
) -> tuple[Float[Tensor, "b h q"], Bool[Tensor, "b h q"]]:
    """What is kept as a share of what falls on keys, and which rows look at any.

    With a sink, keys may get too little for a log-sum-exp to show it: so both are added up. Without
    one (None) keys get everything."""
    empty = lse == -torch.inf
    if on_keys is not None:
        empty = empty | (on_keys <= 0)
        kept = kept / torch.where(empty, 1.0, on_keys)
    return torch.where(empty, 1.0, kept.clamp(max=1.0)), ~empty


def mean_recall(total: Float[Tensor, "b h"], many: Tensor) -> Float[Tensor, "b h"]:
    """The mean of so many rows; 1 of none, since nothing is lost."""
    return torch.where(many > 0, total / many.clamp_min(1), 1.0)


def indexer_target(
    x: AttentionInputs, lse: Float[Tensor, "b h q"], size: int, queries: tuple[int, int]
) -> Float[Tensor, "*b some_q key_blocks"]:
    """The weights of all heads together for each block of keys, as shares of 1."""
    target = shares(head_sums(x, lse, key_blocks(size, x.shape.K), queries))
    if x.rank > 4:
        return target.reshape(*x.lead, *target.shape[1:])
    return target[0] if x.rank == 2 else target


def head_sums(
    x: AttentionInputs, lse: Float[Tensor, "b h q"], blocks: KeyBlocks, queries: tuple[int, int]
) -> Float[Tensor, "b some_q key_blocks"]:
    """The weights of all heads together for each block of keys. Differentiable."""
    _refuse_transforms("indexer_target()", x, lse)

    def ask(x: AttentionInputs, lse: Tensor) -> tuple[Tensor]:
        return (MASS.summed(x, lse, blocks, queries),)

    def vjp(x: AttentionInputs, lse: Tensor, g: Tensor, *, bias: bool) -> Learned:
        return MASS.pull_summed(x, lse, g, blocks, queries, bias=bias)

    (summed,) = answer(Question("indexer_target()", ask, vjp), x, lse)
    return summed


def shares(summed: Float[Tensor, "b q key_blocks"]) -> Float[Tensor, "b q key_blocks"]:
    """Sums as shares of 1 for each query; zeros for one that sees nothing."""
    total = summed.sum(-1, keepdim=True)
    return summed / torch.where(total > 0, total, 1.0)


def key_blocks(size: int, keys: int) -> KeyBlocks:
    """So many keys in blocks of one size."""
    size = _size("indexer_target: size", size)
    return KeyBlocks(size, -(-keys // size))


def chosen_blocks(
    x: AttentionInputs, blocks: Blocks, size: int | tuple[int, int], of: Shape | None = None
) -> ChosenBlocks:
    """Blocks for every batch entry and head, from booleans or indices for some of them; of a call
    of another shape, if `x` has only some of its places."""
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(sizes) != 2:
        raise RegardError("a size of blocks is a number, or (queries, keys)", got=repr(size))
    rows, columns = (_size("recall: a size of blocks", n) for n in sizes)
    B, H, Q, K = shape = of or x.shape
    many = -(-Q // rows), -(-K // columns)
    if not isinstance(blocks, Tensor) or blocks.is_floating_point() or blocks.is_complex():
        got = str(blocks.dtype) if isinstance(blocks, Tensor) else type(blocks).__name__
        _refuse_blocks(shape, sizes, many, got)
    kept = blocks.to(x.q.device)
    if kept.dtype != torch.bool and kept.ndim >= 2:
        kept = _marked(kept, many[1], columns)
    G = x.k.shape[1]
    if kept.ndim > 2 and x.rank >= 4 and G != H and kept.shape[-3] == G > 1:
        kept = kept.repeat_interleave(H // G, -3)
    axes = {2: (), 3: (B,), 4: (B, H)}.get(x.rank, (*x.lead, H))
    try:
        whole_table = kept.expand(*axes, *many) if kept.shape[-2:] == many else None
    except RuntimeError:
        whole_table = None
    if whole_table is None:
        _refuse_blocks(shape, sizes, many, f"{blocks.dtype} {list(blocks.shape)}")
    assert whole_table is not None
    return ChosenBlocks(whole_table.reshape(B, H, *many), rows, columns)


def _marked(indices: Tensor, many: int, size: int) -> Tensor:
    """Booleans for the blocks that are named by their index; -1 names none."""
    indices = indices.long()  # the number of blocks need not fit a smaller kind
    if indices.numel() and (int(indices.min()) < -1 or int(indices.max()) >= many):
        raise RegardError(
            "recall: there is no such block of keys",
            got=f"indices from {int(indices.min())} to {int(indices.max())}",
            accepted=f"0 to {many - 1}, in blocks of {size}; -1 for none",
        )
    marked = indices.new_zeros(*indices.shape[:-1], many + 1, dtype=torch.bool)
    named = torch.where(indices < 0, many, indices)
    return marked.scatter_(-1, named, True)[..., :many]


def _refuse_blocks(shape: Shape, sizes: tuple[int, ...], many: tuple[int, int], got: str) -> None:
    B, H, Q, K = shape
    raise RegardError(
        "recall: the blocks do not cover the call",
        got=f"{got} for {Q} queries in blocks of {sizes[0]} and {K} keys in blocks of {sizes[1]}",
        accepted=f"booleans [{B} or 1, {H} or 1, {many[0]}, {many[1]}], or indices of blocks "
        f"[.., {many[0]}, many]; axes in front may be left out, and heads may be key heads",
    )


def _size(what: str, size: int) -> int:
    if whole(what, size) < 1:
        raise RegardError(f"{what} counts places", got=str(size), accepted="1 or more")
    return size


def _refuse_transforms(name: str, x: AttentionInputs, lse: Tensor) -> None:
    if transformed((*x.tensors(), lse)):
        raise RegardError(
            f"{name} does not go through transforms of torch.func or forward mode",
            accepted="backward()",
            do=f"trace.detach().{name} outside of the transform, for its numbers alone",
        )
