"""Compile the commonest kernels for a compute capability, without a GPU:
`python -m regard.backends.triton.prepared.prebuild`.

Calls are made on meta tensors, and their launches compiled instead of made. So the file holds what
such calls really launch, whatever the tuning says.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from regard import masks
from regard.backends.triton.launches.binaries import Binary, taken_from
from regard.backends.triton.launches.launched import Collected
from regard.backends.triton.launches.shipped import place_of, write
from regard.backends.triton.prepared.common_calls import (
    LONG,
    MIDDLE,
    SHORT,
    Asked,
    attended,
    call,
    common_calls,
    launches,
    learn,
    rows,
)
from regard.backends.triton.questions.top_keys import top_keys
from regard.backends.triton.settings.tuning import looking_settings
from regard.errors import RegardError

_NO_LINES = "TRITON_DISABLE_LINE_INFO"
DOCUMENT = 100
"""Lengths of packed documents, in tokens."""


def kinds() -> Iterator[Asked]:
    """The commonest calls of decoders and encoders, in half precision."""
    for width in (64, 128):
        for dtype in (torch.bfloat16, torch.float16):
            bfloat = dtype == torch.bfloat16
            yield from common_calls(width, dtype, (None, masks.causal()), gradients=bfloat)
            x = call(dtype, width, MIDDLE, mask=masks.causal())
            # Lists of 2 to 8 keys.
            yield partial(top_keys, x, looking_settings(x), rows(x), 8)
            for n in (SHORT, MIDDLE, LONG):
                padded = masks.padding([n])
                for mask in (padded, masks.causal() & padded):
                    yield from attended(call(dtype, width, n, mask=mask))
        for n in (SHORT, MIDDLE, LONG):
            window = masks.causal() & masks.window(DOCUMENT)
            documents = masks.documents(torch.arange(n) // DOCUMENT)
            for mask in (window, documents & masks.causal()):
                yield from attended(call(torch.bfloat16, width, n, mask=mask))
        yield partial(learn, call(torch.bfloat16, width, LONG, mask=documents & masks.causal()))


class Card:
    """What Triton asks of a GPU, answered without one."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # Triton keeps, by device, for what it compiles: one process may compile for several.
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def build(wanted: dict[str, Collected], capability: int, jobs: int) -> dict[str, Binary]:
    """Compile launches in parallel."""
    built: dict[str, Binary] = {}
    with standing_in(capability), ThreadPoolExecutor(jobs) as compilers:
        waiting = {
            compilers.submit(kernel.compiled, given, constants): what
            for what, (kernel, given, constants) in wanted.items()
        }
        for done in as_completed(waiting):
            binary = taken_from(done.result())
            if binary is None:
                what = waiting[done]
                raise RegardError("a kernel cannot be launched by the driver alone", got=what)
            built[waiting[done]] = binary
            print(f"{len(built)} of {len(waiting)}: {binary.name}", file=sys.stderr, flush=True)
    return built


@contextmanager
def standing_in(capability: int) -> Iterator[None]:
    """Triton compiles for such GPUs, whether there is one or not."""
    driver.set_active(Card(capability))
    # Line numbers are of no use in a binary, and most of its size.
    before = os.environ.get(_NO_LINES)
    os.environ[_NO_LINES] = "1"
    try:
        yield
    finally:
        driver.set_active(None)
        if before is None:
            del os.environ[_NO_LINES]
        else:
            os.environ[_NO_LINES] = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90, help="of the cards: 90 is Hopper's")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="the file; by default where regard looks for it")
    how = parser.parse_args()
    to = how.out or place_of(how.capability)
    wanted = launches(how.capability, kinds())
    print(f"{len(wanted)} kernels with Triton {triton.__version__}", file=sys.stderr)
    write(to, build(wanted, how.capability, how.jobs), f"triton {triton.__version__}")
    print(f"{to.name}: {to.stat().st_size / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
