"""Many small computations, each on one core.

PyTorch shares every operation among all cores and waits for the last. For the small operations of
a tile that gains little, and where other programs run it waits for them each time: tiles of 0.1 s
took 4 s beside a busy neighbour. Heads and tiles do not wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

import torch

MOST = 16
"""So many at once: each takes memory."""
Given = TypeVar("Given")
Found = TypeVar("Found")


@contextmanager
def one_core() -> Iterator[None]:
    """What this thread computes inside is computed by this thread alone.

    >>> with one_core():
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    # That was for this thread, and for those yet to start: they get back what they had.
    other = threading.Thread(target=torch.set_num_threads, args=(before,))
    other.start()
    other.join()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_cores(do: Callable[[Given], Found], each: Sequence[Given]) -> Iterator[Found]:
    """Do something with each of many things, as many at once as there are cores; in order.

    >>> list(on_cores(lambda n: n * n, range(4)))
    [0, 1, 4, 9]
    """

    def alone(one: Given) -> Found:
        with one_core():
            return do(one)

    # Who may stop this thread may stop those as well: each goes on in a copy of its context.
    contexts = [copy_context() for _ in each]
    with ThreadPoolExecutor(min(MOST, torch.get_num_threads())) as pool:
        yield from pool.map(lambda context, one: context.run(alone, one), contexts, each)
