"""Compiled calls in numbers of which nothing is learned, as operators of their own: autograd is not
asked on the way, and all that a backend decides is decided once for a kind."""

# No deferred annotations here: torch.library reads the types to make the operators' schemas.
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.backends.contract import Repeated, Rows, Tabled, empty_table
from regard.backends.passes import Call, no_autocast, taken_apart
from regard.backends.told_kinds import in_numbers, keep, kind_of
from regard.inputs import AttentionInputs
from regard.transforms import exporting, in_forward_mode, under_torch_func


@runtime_checkable
class Repeat(Protocol):
    """How calls of one's kind are run."""

    def __call__(self, x: AttentionInputs, /, *, statistics: bool) -> Repeated: ...


def fits(x: AttentionInputs) -> bool:
    """Whether a call is one for these operators."""
    return (
        torch.compiler.is_compiling()
        and not exporting()
        and not under_torch_func()
        and not in_forward_mode()
        and not x.needs_grad
        and in_numbers(x)
    )


def register(
    name: str, repeated: Repeat, empty_out: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[AttentionInputs, bool], Rows]:
    """Make the operator regard::{name}_unlearned, and give a function that calls it.

    `empty_out` gives, from q and v, an empty tensor like the output. What the operator gives is the
    output, and where statistics are asked for a table of them, as `Tabled` has it: outputs of an
    operator must not share memory."""
    known: dict[Hashable, Repeated] = {}

    def attended(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        text: str,
        integers: Sequence[int],
        floats: Sequence[float],
        softcap: float | None,
        statistics: bool,
    ) -> list[Tensor]:
        kind = kind_of(text, integers, floats, softcap, q, k, v)
        again = known.get((kind, statistics))
        if again is None:
            x = Call((text, integers, floats, softcap, 0.0)).inputs(q, k, v, None, None)
            again = repeated(x, statistics=statistics)
            if kind is None:
                with no_autocast(q):
                    return _listed(again(q, k, v))
            keep(known, (kind, statistics), again)
        return _listed(again(q, k, v))

    def shaped(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
        out = empty_out(q, v)
        if not rest[-1]:
            return [out]
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return [out, empty_table(q, *q.shape[:3], dtype=dtype)]

    whole = f"regard::{name}_unlearned"
    # Past `custom_op`, which takes as long as a small call does.
    torch.library.define(whole, torch.library.infer_schema(attended, mutates_args=()))
    torch.library.impl(whole, ("CPU", "CUDA"), attended)
    torch.library.register_fake(whole, shaped)
    operator = getattr(torch.ops.regard, f"{name}_unlearned").default

    def run(x: AttentionInputs, statistics: bool) -> Rows:
        call, (q, k, v, *_) = taken_apart(x)
        *told, _ = call.told
        out, *table = operator(q, k, v, *told, statistics)
        if not table:
            nothing = out.new_empty(0)
            return Rows(out, nothing, nothing, nothing)
        largest, entropy, lse = table[0].unbind()
        return Rows(out, lse, largest, entropy)

    return run


def _listed(rows: Rows | Tensor) -> list[Tensor]:
    if isinstance(rows, Tensor):
        return [rows]
    if isinstance(rows, Tabled):
        return [rows.out, rows.table[:3]]
    out, lse, largest, entropy = rows
    table = empty_table(lse, *lse.shape, dtype=lse.dtype)
    for row, of in zip(table, (largest, entropy, lse), strict=True):
        row.copy_(of)
    return [out, table]
