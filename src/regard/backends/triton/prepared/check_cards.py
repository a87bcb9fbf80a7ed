"""Compile all kinds of kernels for a card that is not there, and compare their shared memory with
what it has: `python -m regard.backends.triton.prepared.check_cards --capability 80`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import compiler

from regard import biases, masks
from regard.backends.passes import Pull
from regard.backends.questions.matching_keys import matching_keys
from regard.backends.triton.backward import backward
from regard.backends.triton.forward import forward
from regard.backends.triton.launches.launched import Collected
from regard.backends.triton.layout import is_compact
from regard.backends.triton.prepared.common_calls import Asked, launches, rows
from regard.backends.triton.prepared.prebuild import standing_in
from regard.backends.triton.questions.key_mass import of_keys
from regard.backends.triton.questions.longest import squared_lengths
from regard.backends.triton.questions.maps import pooled_map
from regard.backends.triton.questions.mean_logits import mean_logits
from regard.backends.triton.questions.pair_sums import matching_mass, offset_sums
from regard.backends.triton.questions.received import received_by_keys
from regard.backends.triton.questions.top_keys import top_keys
from regard.backends.triton.settings.cards import CARDS, Card, standing_for
from regard.backends.triton.settings.tuning import looking_settings
from regard.inputs import AttentionInputs, check

WIDTHS = (16, 32, 64, 128, 256)
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KINDS = ("none", "causal", "padding", "documents", "holes", "dense", "relative", "alibi")
TENSOR_MEMORY = 512
"""Columns of it that a multiprocessor has, where products are kept there (B200)."""
HEADS = 4
_FEW = (1, 20, 40)


class Taken(NamedTuple):
    """What one kernel takes of a multiprocessor."""

    name: str
    what: str
    """All that it is compiled for."""
    shared: int
    tensor: int
    """Columns of tensor memory."""

    def fits(self, card: Card) -> bool:
        return self.shared <= card.shared and self.tensor <= TENSOR_MEMORY


def call(dtype: torch.dtype, width: int, kind: str, Q: int, K: int, groups: int) -> AttentionInputs:
    """A call on meta tensors with a kind of mask or bias."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    mask: masks.Mask | None = None
    bias: biases.Bias | None = None
    match kind:
        case "causal":
            mask = masks.causal()
        case "padding":
            mask = masks.padding([K])
        case "documents":
            mask = masks.documents(torch.arange(K) // 100)
        case "holes":
            mask = masks.where(lambda b, h, q, k: (q + k) % 3 != 0)
        case "dense":
            bias = biases.dense(empty(1, HEADS, Q, K).float())
        case "relative":
            bias = biases.relative(torch.empty(HEADS, 65, device="meta"))
        case "alibi":
            bias = biases.alibi(torch.empty(HEADS, device="meta"))
    k = empty(1, groups, K, width)
    return check(
        empty(1, HEADS, Q, width), k, k, mask=mask, score=None, bias=bias, softcap=None, sink=None,
        scale=None, dropout=0.0, training=False,
    )  # fmt: skip


def all_kinds(dtype: torch.dtype, width: int, kinds: Iterable[str] = KINDS) -> Iterator[Asked]:
    """Every pass over every kind of call with one type and head dimension."""
    for kind in kinds:
        # Masks that need lists of tiles are looked at pair by pair.
        long = 512 if kind in ("documents", "holes") else 4096
        for n in (256, long):
            x = call(dtype, width, kind, n, n, HEADS)
            for statistics in (True, False):
                yield partial(forward, x, statistics=statistics)
        x = call(dtype, width, kind, long, long, HEADS)
        yield from (partial(learn, x, entropy=entropy) for entropy in (False, True))
        yield from looked_at(x)
        for groups in (HEADS, 1):
            for few in _FEW:
                for keys in (100, long):
                    x = call(dtype, width, kind, min(few, keys), keys, groups)
                    yield partial(forward, x, statistics=True)


def learn(x: AttentionInputs, *, entropy: bool) -> None:
    """The backward pass from gradients of the output, and of the entropy."""
    found, kept = forward(x, statistics=True)
    pull = Pull(torch.empty_like(found.out), None, rows(x) if entropy else None)
    backward(x, found, kept, pull, bias=x.bias is not None)


def looked_at(x: AttentionInputs) -> Iterator[Asked]:
    """Every kernel of the second pass."""
    how = looking_settings(x)
    yield partial(squared_lengths, x)
    yield partial(received_by_keys, x, how, rows(x))
    yield partial(of_keys, x, how, rows(x), torch.zeros(1, dtype=torch.int64))
    yield partial(top_keys, x, how, rows(x), 64)
    yield partial(mean_logits, x, how)
    yield partial(mapped, x)
    if is_compact(x.mask, x.shape, x.q.device):
        yield partial(offset_sums, x, how, rows(x), 64)
        yield partial(of_own_kind, x)


def of_own_kind(x: AttentionInputs) -> None:
    """What queries give to keys of their own kind."""
    asks, holds = (
        torch.empty(x.shape.B, n, dtype=torch.int64, device=x.q.device) for n in x.shape[2:]
    )
    matching_mass(x, looking_settings(x), rows(x), matching_keys(asks, holds, earlier=True))


def mapped(x: AttentionInputs) -> None:
    """A pooled map of all pairs."""
    whole = (0, x.shape.Q), (0, x.shape.K)
    pooled_map(x, looking_settings(x), rows(x), (4, 4), *whole, "mean")


def taken(wanted: dict[str, Collected], capability: int, *, allocate: bool) -> Iterator[Taken]:
    """What launches take, each compiled whole; or only until its memory is allocated, which is
    several times quicker."""
    with standing_in(capability):
        for what, (kernel, given, constants) in wanted.items():
            name = kernel.kernel.fn.__name__
            compile_it = partial(kernel.compiled, given, constants)
            shared, tensor = _allocated(compile_it) if allocate else _compiled(compile_it)
            yield Taken(name, what, shared, tensor)


def _compiled(compile_it: Callable[[], Any]) -> tuple[int, int]:
    metadata = compile_it().metadata
    return metadata.shared, getattr(metadata, "tmem_size", None) or 0


class _AllocatedError(Exception):
    """Ends a compilation: shared memory and tensor memory are allocated."""


def _allocated(compile_it: Callable[[], Any]) -> tuple[int, int]:
    with _only_allocating():
        try:
            return _compiled(compile_it)
        except _AllocatedError as found:
            shared, tensor = found.args
            return shared, tensor or 0


@contextmanager
def _only_allocating() -> Iterator[None]:
    """Triton lowers kernels until it allocates memory, and goes no further."""

    def allocate(backend: Any, options: Any, capability: int, mod: Any, metadata: Any) -> None:
        version = compiler.get_ptx_version_from_options(options, backend.target.arch)
        steps = compiler.ir.pass_manager(mod.context)
        compiler.passes.ttgpuir.add_combine_tensor_select_and_if(steps)
        compiler.passes.ttgpuir.add_allocate_warp_groups(steps, False)
        compiler.passes.convert.add_scf_to_cf(steps)
        compiler.passes.gluon.add_inliner(steps)
        compiler.nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(steps, capability, version)
        compiler.nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(steps)
        steps.run(mod, "allocate")
        raise _AllocatedError(
            mod.get_int_attr("ttg.shared"), mod.get_int_attr("ttg.tensor_memory_size")
        )

    def changed(*given: Any) -> Any:
        if not given:
            # What such compilations are cached by: none is used for another.
            return "allocate", "allocate"
        backend, stages, options, _, capability = given
        stages["llir"] = partial(allocate, backend, options, capability)
        return None

    before = knobs.runtime.add_stages_inspection_hook
    knobs.runtime.add_stages_inspection_hook = changed
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, choices=sorted(CARDS), required=True)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--types", choices=TYPES, nargs="*", default=list(TYPES))
    parser.add_argument("--kinds", choices=KINDS, nargs="*", default=KINDS)
    parser.add_argument(
        "--allocate", action="store_true", help="only until memory is allocated: much quicker"
    )
    how = parser.parse_args()
    card, most, count, wrong = standing_for(how.capability), 0, 0, 0
    for width in how.widths:
        for name in how.types:
            wanted = launches(how.capability, all_kinds(TYPES[name], width, how.kinds))
            for one in taken(wanted, how.capability, allocate=how.allocate):
                count, most = count + 1, max(most, one.shared)
                if not one.fits(card):
                    wrong += 1
                    print(f"{one.name} {name} {width}: {one.shared:,} bytes, {one.tensor} columns")
                    print(f"  {one.what}", flush=True)
            print(f"{name} {width}: {count} kernels so far, {wrong} too large", file=sys.stderr)
    print(f"{count} kernels; the largest takes {most:,} of {card.shared:,} bytes")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
