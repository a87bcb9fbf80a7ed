"""What a mask is: a rule for which query may attend to which key, and how rules combine.

A mask holds no lengths. `bind` gives it the lengths of one call and returns a bound mask, in which
alignment and shapes are settled; everything that needs lengths is asked of the bound one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Int8
from torch import Tensor

from regard.errors import RegardError
from regard.masks.spans import Spans, joined, met, of_band, rest_of
from regard.masks.tiles import PairRule, Tiles, count, draw, grid, judge_band, states
from regard.values import Axes, Pick, Shape, Value


class Mask(PairRule, Value):
    """Which query may attend to which key. Combine with `&`, `|` and `~`."""

    def on(self, axes: Axes) -> Mask:
        """This mask with the axes of its tensors read as those of a caller's inputs."""
        return self

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        """This mask with alignment settled and shapes checked for one call."""
        raise NotImplementedError

    def select(self, batch: Pick, heads: Pick) -> Mask:
        """The part of a bound mask for some batch entries and heads."""
        return self

    def spans(self, shape: Shape, device: torch.device) -> Spans | None:
        """The run of keys that each query sees under a bound mask; None where the mask has no
        such runs."""
        band = self.band()
        return None if band is None else of_band(band, shape, device)

    def spans_of_rest(self, shape: Shape, device: torch.device) -> Spans | None:
        """The same for what a bound mask does not allow."""
        seen = self.spans(shape, device)
        return None if seen is None else rest_of(seen, shape)

    def __and__(self, other: Mask) -> Mask:
        return And(self, _mask(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _mask(other, "|"))

    # A tensor on the left comes here, and is refused with the same words.
    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise RegardError(
            "a mask has no truth value",
            got=f"`and`, `or`, `not` or `if` with {self!r}",
            do="combine masks with &, | and ~",
        )

    def dense(self, queries: int, keys: int | None = None) -> Bool[Tensor, "b h q k"]:
        """Every pair, True where allowed. This is the n×n tensor, since it was asked for.

        >>> from regard import masks
        >>> masks.causal().dense(3)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
        """
        shape, bound = self._alone(queries, keys)
        device = self.device
        return pairs(
            bound, torch.arange(shape.Q, device=device), torch.arange(shape.K, device=device)
        )

    def count(self, queries: int, keys: int | None = None) -> int:
        """How many pairs are allowed, exactly, without building them.

        >>> from regard import masks
        >>> masks.causal().count(1_000_000)
        500000500000
        """
        shape, bound = self._alone(queries, keys)
        return count(bound, shape, self.device)

    def tiles(
        self, queries: int, keys: int | None = None, size: int = 128
    ) -> Int8[Tensor, "b h tq tk"]:
        """The state of every tile: 0 empty, 1 partial, 2 full.

        >>> from regard import masks
        >>> masks.causal().tiles(512)[0, 0]
        tensor([[1, 0, 0, 0],
                [2, 1, 0, 0],
                [2, 2, 1, 0],
                [2, 2, 2, 1]], dtype=torch.int8)
        """
        if size < 1:
            raise RegardError("tiles: size counts tokens", got=str(size), accepted="1 or more")
        shape, bound = self._alone(queries, keys)
        return grid(bound, shape, size, size, self.device, exact=True)

    def draw(self, queries: int = 16, keys: int | None = None, width: int = 32) -> str:
        """The mask as text, one head; long ones are drawn by tiles.

        >>> from regard import masks
        >>> print((masks.causal() & masks.window(2)).draw(5))
        ██········
        ████······
        ██████····
        ··██████··
        ····██████
        """
        if width < 1:
            raise RegardError("draw: width counts cells", got=str(width), accepted="1 or more")
        shape, bound = self._alone(queries, keys)
        return draw(bound, shape, width, self.device)

    def _alone(self, queries: int, keys: int | None) -> tuple[Shape, Mask]:
        keys = queries if keys is None else keys
        if queries < 0 or keys < 0:
            raise RegardError(
                "a mask was given a negative length",
                got=f"queries={queries}, keys={keys}",
                accepted="zero or more",
            )
        shape = Shape(self.batch, self.heads, queries, keys)
        return shape, self.bind(shape, self.device)

    @property
    def device(self) -> torch.device:
        """Where the mask's tensors live; the CPU for a mask that has none."""
        tensors = self.tensors()
        return tensors[0].device if tensors else torch.device("cpu")


def pairs(bound: Mask, q: Int[Tensor, "q"], k: Int[Tensor, "k"]) -> Bool[Tensor, "b h q k"]:
    """Which of some queries may see which of some keys: [b or 1, h or 1, q, k]."""
    b = torch.arange(bound.batch, device=q.device).view(-1, 1, 1, 1)
    h = torch.arange(bound.heads, device=q.device).view(-1, 1, 1)
    allowed = bound.allows(b, h, q[:, None], k)
    return allowed.expand(bound.batch, bound.heads, len(q), len(k))


def _mask(other: object, operator: str) -> Mask:
    if isinstance(other, Mask):
        return other
    raise RegardError(
        f"{operator} combines masks with masks",
        got=type(other).__name__,
        accepted="a mask from regard.masks",
        do="wrap a boolean tensor in masks.keep(t) (True is attended to) or masks.ignore(t)",
    )


def _judge_by_distance(mask: Mask, tiles: Tiles) -> Int8[Tensor, "1 1 t"]:
    """For a mask of distances alone: count the allowed distances inside each tile."""
    if not len(tiles.q0):
        return torch.zeros(1, 1, 0, dtype=torch.int8, device=tiles.q0.device)
    least, most = tiles.k0 - tiles.q1 + 1, tiles.k1 - 1 - tiles.q0
    low, high = int(least.min()), int(most.max())
    distance = torch.arange(low, high + 1, device=least.device)
    q = (-distance).clamp_min(0)
    zero = torch.zeros_like(q)
    allowed = mask.allows(zero, zero, q, q + distance)
    before = torch.nn.functional.pad(allowed.cumsum(0), (1, 0))
    inside = before[most - low + 1] - before[least - low]
    return states(full=inside == most - least + 1, empty=inside == 0)


class _Pair(Mask):
    """Two masks combined."""

    left: Mask
    right: Mask
    sign = ""

    def on(self, axes: Axes) -> Mask:
        return type(self)(self.left.on(axes), self.right.on(axes))  # type: ignore[call-arg]

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        return type(self)(self.left.bind(shape, device), self.right.bind(shape, device))  # type: ignore[call-arg]

    def select(self, batch: Pick, heads: Pick) -> Mask:
        return type(self)(self.left.select(batch, heads), self.right.select(batch, heads))  # type: ignore[call-arg]

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self.right.batch if self.left.batch == 1 else self.left.batch

    @property
    def heads(self) -> int:  # type: ignore[override]
        return self.right.heads if self.left.heads == 1 else self.left.heads

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.left.relative and self.right.relative

    def __repr__(self) -> str:
        def shown(part: Mask) -> str:
            return f"({part!r})" if isinstance(part, _Pair) else repr(part)

        chain = isinstance(self.left, _Pair) and self.left.sign == self.sign
        left = repr(self.left) if chain else shown(self.left)
        return f"{left} {self.sign} {shown(self.right)}"


@dataclass(frozen=True, eq=False, repr=False)
class And(_Pair):
    """Pairs that both masks allow."""

    left: Mask
    right: Mask
    sign = "&"

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        """What masks nothing of a call is left out, as causal does for one query at the end. (Not
        while a call is compiled: it would be for such lengths alone.)"""
        left, right = (part.bind(shape, device) for part in (self.left, self.right))
        if not torch.compiler.is_compiling():
            for one, other in ((left, right), (right, left)):
                band = one.band()
                if band is not None and band[0] <= 1 - shape.Q and band[1] >= shape.K - 1:
                    return other
        return And(left, right)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        return self.left.allows(b, h, q, k) & self.right.allows(b, h, q, k)

    def judge(self, tiles: Tiles) -> Int8[Tensor, "b h t"]:
        band = self.band()
        if band is not None:
            return judge_band(tiles, *band)
        if self.relative:
            return _judge_by_distance(self, tiles)
        return torch.minimum(self.left.judge(tiles), self.right.judge(tiles))

    def band(self) -> tuple[float, float] | None:
        left, right = self.left.band(), self.right.band()
        if left is None or right is None:
            return None
        return max(left[0], right[0]), min(left[1], right[1])

    def spans(self, shape: Shape, device: torch.device) -> Spans | None:
        left, right = self.left.spans(shape, device), self.right.spans(shape, device)
        return None if left is None or right is None else met(left, right)


@dataclass(frozen=True, eq=False, repr=False)
class Or(_Pair):
    """Pairs that either mask allows."""

    left: Mask
    right: Mask
    sign = "|"

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        return self.left.allows(b, h, q, k) | self.right.allows(b, h, q, k)

    def judge(self, tiles: Tiles) -> Int8[Tensor, "b h t"]:
        if self.relative:
            return _judge_by_distance(self, tiles)
        return torch.maximum(self.left.judge(tiles), self.right.judge(tiles))

    def spans(self, shape: Shape, device: torch.device) -> Spans | None:
        left, right = self.left.spans(shape, device), self.right.spans(shape, device)
        return None if left is None or right is None else joined(left, right)


@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """Pairs that a mask does not allow."""

    mask: Mask

    def on(self, axes: Axes) -> Mask:
        return Not(self.mask.on(axes))

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        return Not(self.mask.bind(shape, device))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        return ~self.mask.allows(b, h, q, k)

    def judge(self, tiles: Tiles) -> Int8[Tensor, "b h t"]:
        return 2 - self.mask.judge(tiles)

    def select(self, batch: Pick, heads: Pick) -> Mask:
        return Not(self.mask.select(batch, heads))

    def spans(self, shape: Shape, device: torch.device) -> Spans | None:
        return self.mask.spans_of_rest(shape, device)

    def spans_of_rest(self, shape: Shape, device: torch.device) -> Spans | None:
        return self.mask.spans(shape, device)

    def band(self) -> tuple[float, float] | None:
        inner = self.mask.band()
        if inner is None:
            return None
        if inner[0] == -math.inf:
            return inner[1] + 1, math.inf
        return (-math.inf, inner[0] - 1) if inner[1] == math.inf else None

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self.mask.batch

    @property
    def heads(self) -> int:  # type: ignore[override]
        return self.mask.heads

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.mask.relative

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, _Pair) else f"~{self.mask!r}"
