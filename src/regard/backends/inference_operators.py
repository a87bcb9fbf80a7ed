"""Compiled calls without gradients, as operators of their own: they bypass autograd, and what a
backend decides is decided once for each kind of call."""

# No deferred annotations here: torch.library reads the types to make the operators' schemas.
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.backends.called_forms import Run
from regard.backends.contract import Repeated, Rows, Tabled, table_step
from regard.backends.operator_kinds import in_numbers, keep, kind_of
from regard.backends.passes import Call
from regard.inputs import AttentionInputs
from regard.transforms import exporting, in_forward_mode, under_torch_func
from regard.values import encode


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
    name: str, run: Run, repeated: Repeat, empty_out: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[AttentionInputs, bool], Rows]:
    """Make the operator regard::{name}_inference, and give a function that calls it.

    `run` is for calls that have no kind, `repeated` for those that have one. `empty_out` gives,
    from q and v, an empty tensor like the output. The operator gives the output, and where
    statistics are asked for the memory of a table of them, as `Tabled` has it: outputs of an
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
            if kind is None:
                rows = run(x, statistics=statistics)
                return _listed(rows if statistics else rows.out)
            again = keep(known, (kind, statistics), repeated(x, statistics=statistics))
        return _listed(again(q, k, v))

    def shaped(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
        out = empty_out(q, v)
        if not rest[-1]:
            return [out]
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        B, H, Q = q.shape[:3]
        return [out, q.new_empty(_size(B, H, Q, dtype), dtype=dtype)]

    whole = f"regard::{name}_inference"
    # Past `custom_op`, which takes as long as a small call does.
    torch.library.define(whole, torch.library.infer_schema(attended, mutates_args=()))
    torch.library.impl(whole, "default", attended)
    torch.library.register_fake(whole, shaped)
    operator = getattr(torch.ops.regard, f"{name}_inference").default

    def call(x: AttentionInputs, statistics: bool) -> Rows:
        text, integers, floats, _ = encode((x.comparison, x.mask, x.bias), here=True)
        out, *table = operator(x.q, x.k, x.v, text, integers, floats, x.softcap, statistics)
        if not table:
            nothing = out.new_empty(0)
            return Rows(out, nothing, nothing, nothing)
        largest, entropy, lse = _taken_apart(table[0], *x.q.shape[:3])
        return Rows(out, lse, largest, entropy)

    return call


def _listed(rows: Rows | Tensor) -> list[Tensor]:
    if isinstance(rows, Tensor):
        return [rows]
    B, H, Q = rows.out.shape[:3]
    if isinstance(rows, Tabled):
        # In one axis: whether rows lie side by side would be asked of each length.
        return [rows.out, rows.table.as_strided((_size(B, H, Q, rows.table.dtype),), (1,))]
    out, lse, largest, entropy = rows
    memory = lse.new_empty(_size(B, H, Q, lse.dtype))
    for row, of in zip(_taken_apart(memory, B, H, Q), (largest, entropy, lse), strict=True):
        row.copy_(of)
    return [out, memory]


def _size(B: int, H: int, Q: int, dtype: torch.dtype) -> int:
    """Numbers in the memory of a table of three rows."""
    return 2 * table_step(B * H * Q, dtype.itemsize) + B * H * Q


def _taken_apart(memory: Tensor, B: int, H: int, Q: int) -> list[Tensor]:
    step = table_step(B * H * Q, memory.dtype.itemsize)
    return [memory.narrow(0, i * step, B * H * Q).view(B, H, Q) for i in range(3)]
