"""Which calls are measured: a named part of widths × heads × kinds × lengths × passes × types.

In each group the most telling come first, as do the groups: `in_order` takes a few of each in
turns, so that where time runs out every group has been looked into.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

TOKENS = 16384
"""Of a batch, where its texts are not longer."""
AT_ONCE = 3
"""Cases of a group before the next has its turn."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    heads: str = "16/16"
    """Of queries and of keys."""
    width: int = 128
    n: int = 4096
    """Tokens of a text, or keys where a single query is decoded."""
    kind: str = "causal"
    dtype: str = "bf16"
    backward: bool = False
    values: int = 0
    """How wide values are, if not as keys."""
    batch: int = 0
    """Texts; 0 for as many as make TOKENS."""
    decode: bool = False

    @property
    def H(self) -> int:
        return int(self.heads.split("/")[0])

    @property
    def G(self) -> int:
        return int(self.heads.split("/")[1])

    @property
    def B(self) -> int:
        return self.batch or max(1, TOKENS // self.n)

    @property
    def Q(self) -> int:
        return 1 if self.decode else self.n

    @property
    def E(self) -> int:
        return self.values or self.width

    def __str__(self) -> str:
        wide = f"{self.width}" + (f" (values {self.values})" if self.values else "")
        length = f"{self.n // 1024}k" if self.n % 1024 == 0 else str(self.n)
        length = "1M" if self.n == 1 << 20 else length
        said = [f"{self.heads} × {wide}", f"{self.B} × {length}"]
        said += [] if self.decode else [self.kind]
        said += ["forward+backward"] if self.backward else []
        said += [self.dtype] if self.dtype != "bf16" else []
        return ", ".join(said)

    def flops(self, pairs: int) -> float:
        """Of a number of allowed pairs over all texts and heads: two products forward; backward
        five more, three as wide as keys and two as values."""
        D, E = self.width, self.E
        return 2.0 * pairs * ((4 * D + 3 * E) if self.backward else (D + E))

    def tiny(self) -> Case:
        """As small as shows that the script works."""
        H, G = self.H // 8, max(1, self.G // 8)
        values = self.values // 8
        return replace(self, heads=f"{H}/{G}", width=self.width // 8, n=128, batch=2, values=values)


def _cases(*listed: Case, **same: object) -> list[Case]:
    return [replace(case, **same) for case in listed]  # type: ignore[arg-type]


LONG, LONGEST = 16384, 65536

GROUPS: dict[str, list[Case]] = {
    "forward, causal": [
        Case(n=LONG),
        Case("32/8"),
        Case(width=256),
        Case(width=64),
        Case(width=96),
        Case(width=192, values=128),
        Case(),
        Case(width=80),
        Case("32/1"),
        Case(n=LONGEST),
        Case(width=64, n=LONG),
        Case("32/8", width=64, n=LONG),
        Case(n=5000, batch=4),
        Case(width=256, n=LONG),
        Case(width=96, n=LONG),
        Case("32/8", n=LONG),
        Case(width=192, values=128, n=LONG),
        Case(n=LONG, dtype="fp16"),
        Case("32/8", width=64, dtype="fp16"),
        Case("32/8", width=256),
        Case(width=80, n=LONG),
    ],
    "forward+backward": _cases(
        Case(),
        Case(width=256),
        Case(width=96),
        Case(width=64),
        Case(width=192, values=128),
        Case(n=LONG),
        Case(kind="full"),
        Case(width=80),
        Case(width=64, n=LONG),
        Case(width=64, kind="full"),
        Case(width=256, n=LONG),
        Case(dtype="fp16"),
        backward=True,
    ),
    "forward+backward, grouped": _cases(
        Case("32/8"),
        Case("32/8", width=64),
        Case("32/1"),
        Case("32/8", n=LONG),
        Case("32/8", width=256),
        Case("32/8", width=96),
        Case("32/8", kind="full"),
        Case("32/8", width=64, dtype="fp16"),
        backward=True,
    ),
    "masks": _cases(
        Case(kind="documents", n=LONG),
        Case("32/8", kind="window", n=LONG),
        Case(kind="prefix", n=LONG),
        Case(kind="padding", n=4096),
        Case("32/8", kind="documents", n=LONG),
        Case("32/8", width=64, kind="window", n=LONG),
        Case("32/8", width=64, kind="prefix", n=LONG),
        Case("32/8", kind="padding", n=4096),
        Case(kind="window", n=LONGEST),
        Case(width=64, kind="documents", n=LONG),
        Case(width=256, kind="window", n=LONG),
        Case(width=64, kind="padding", n=1024),
    ),
    "short texts": [
        Case(n=1024),
        Case(width=64, n=1024),
        Case("32/8", n=1024, backward=True),
        Case(n=1024, kind="full"),
        Case(width=64, n=1024, kind="full"),
        Case(n=1024, backward=True),
        Case("32/8", n=512),
        Case(n=512),
        Case(width=64, n=512, kind="full"),
        Case(n=1000, batch=16),
        Case(width=256, n=1024),
        Case(width=96, n=1024),
        Case(width=64, n=512, backward=True),
    ],
    "soft-cap and biases": [
        Case(kind="soft-cap", n=LONG),
        Case("32/8", width=64, kind="sink"),
        Case(kind="ALiBi", n=LONG),
        Case(kind="dropout"),
        Case("32/8", width=256, kind="soft-cap"),
        Case(kind="sink", n=LONG),
        Case("32/8", kind="ALiBi"),
        Case(width=64, kind="dropout"),
    ],
    "masks, forward+backward": _cases(
        Case("32/8", kind="documents", n=LONG),
        Case("32/8", kind="window", n=LONG),
        Case("32/8", kind="prefix", n=LONG),
        Case(kind="padding", n=4096),
        Case(width=64, kind="documents", n=LONG),
        Case(width=64, kind="window", n=LONG),
        Case(width=256, kind="documents", n=LONG),
        backward=True,
    ),
    "soft-cap and biases, forward+backward": _cases(
        Case("32/8", kind="soft-cap"),
        Case("32/8", kind="sink"),
        Case("32/8", kind="ALiBi"),
        Case(kind="dropout"),
        Case("32/8", width=256, kind="soft-cap"),
        Case("32/8", width=64, kind="sink"),
        Case(width=64, kind="dropout", n=1024),
        backward=True,
    ),
    "decode": _cases(
        Case("32/8", n=16384, batch=16),
        Case("128/1", n=16384, batch=16),
        Case("32/8", n=4096, batch=1),
        Case("32/32", n=16384, batch=16),
        Case("128/1", n=4096, batch=64),
        Case("32/8", n=4096, batch=64),
        Case("32/8", n=1 << 20, batch=1),
        Case("128/1", n=65536, batch=1),
        Case("32/32", n=4096, batch=1),
        Case("32/8", width=64, n=16384, batch=16),
        Case("32/8", n=65536, batch=1),
        Case("128/1", n=65536, batch=16),
        Case("32/32", n=65536, batch=1),
        Case("128/1", n=4096, batch=1),
        Case("32/8", n=16384, batch=64),
        Case("128/1", n=1 << 20, batch=1),
        kind="full",
        decode=True,
    ),
    "forward, full": _cases(
        Case(),
        Case(width=64),
        Case(width=256),
        Case(width=96),
        Case("32/8", n=LONG),
        Case(width=192, values=128),
        Case(width=80),
        Case("32/1", width=64),
        Case(n=LONGEST),
        Case(width=64, n=LONG, dtype="fp16"),
        kind="full",
    ),
    "float32": _cases(
        Case(),
        Case(width=64, backward=True),
        Case("32/8", width=64),
        Case(backward=True),
        Case(width=64, n=1024, kind="full"),
        Case(width=64, kind="window", n=LONG),
        Case(width=256),
        Case("32/8", width=64, backward=True),
        dtype="float32",
    ),
    "looking": [
        Case(n=LONG),
        Case("32/8", width=64, n=LONG),
        Case(),
        Case("32/8", width=64),
    ],
}


def in_order(groups: list[str]) -> Iterator[tuple[str, Case]]:
    """A few cases of each group, then the next few."""
    turns = [
        [[(name, case) for case in GROUPS[name][i : i + AT_ONCE]] for i in _starts(name)]
        for name in groups
    ]
    for turn in zip_longest(*turns, fillvalue=[]):
        for some in turn:
            yield from some


def _starts(name: str) -> range:
    return range(0, len(GROUPS[name]), AT_ONCE)


def shares(groups: list[str], processes: int) -> list[list[tuple[str, Case]]]:
    """All cases, for as many processes to compile: those that share kernels in the same one."""
    found: list[list[tuple[str, Case]]] = [[] for _ in range(processes)]
    place: dict[tuple[object, ...], int] = {}
    for name, case in in_order(groups):
        kernels = case.width, case.dtype, case.kind, case.backward, case.decode, name == "looking"
        if kernels not in place:
            place[kernels] = min(range(processes), key=lambda i: len(found[i]))
        found[place[kernels]].append((name, case))
    return found
