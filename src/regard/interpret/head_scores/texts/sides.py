"""The texts on both sides of attention: what the queries read, and what the keys do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.backends.questions.matching_keys import MatchingKeys, matching_keys
from regard.inputs import AttentionInputs
from regard.masks.algebra import Mask
from regard.values import Shape

NOTHING = -1
"""In place of a token, which is 0 or more."""


class _Seen(NamedTuple):
    mask: Mask | None
    shape: Shape
    device: torch.device


@dataclass(frozen=True, eq=False)
class Side:
    """Sequences of one batch. Where what they read are no tokens, only places are known."""

    real: Bool[Tensor, "b n"]
    """Which places are no padding."""
    ids: Int[Tensor, "b n"] | None = None
    whole: bool = False
    """Whether all places are known to be real: a device need not be asked, and waited for."""

    _among: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _counted: dict[str, tuple[_Seen, Tensor]] = field(default_factory=dict)

    @staticmethod
    def of_places(batch: int, places: int, device: torch.device) -> Side:
        return Side(torch.ones(batch, places, dtype=torch.bool, device=device), whole=True)

    @staticmethod
    def of_tokens(ids: Int[Tensor, "b n"]) -> Side:
        """All of them real."""
        return Side(torch.ones_like(ids, dtype=torch.bool), ids, whole=True)

    @property
    def places(self) -> int:
        return self.real.shape[1]

    @cached_property
    def padded(self) -> bool:
        return not self.whole and not bool(self.real.all())

    @cached_property
    def first(self) -> Int[Tensor, "b"]:
        """The first place that is no padding."""
        return self.real.int().argmax(1)

    @cached_property
    def kinds(self) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"]]:
        """For each key, its own token, and the token that it follows; NOTHING for padding."""
        assert self.ids is not None
        before = torch.cat([self.ids[:, :1], self.ids[:, :-1]], 1)
        follows = self.real & torch.cat([torch.zeros_like(self.real[:, :1]), self.real[:, :-1]], 1)
        return self.ids.where(self.real, NOTHING), before.where(follows, NOTHING)

    @cached_property
    def own_matches(self) -> tuple[MatchingKeys, MatchingKeys]:
        """For a text that looks at itself: earlier places of the same token, and those that
        followed it."""
        return self.matches(self, earlier=True)

    def matches(self, keys: Side, *, earlier: bool) -> tuple[MatchingKeys, MatchingKeys]:
        """Keys of the token that each query has, and those that follow it."""
        assert self.ids is not None
        asks = self.ids.where(self.real, NOTHING - 1)
        same, after = (matching_keys(asks, kind, earlier=earlier) for kind in keys.kinds)
        return same, after

    def counted(self, what: str, x: AttentionInputs, count: Callable[[], Tensor]) -> Tensor:
        """What follows from these queries and a mask alone, which most layers have in common."""
        seen = _Seen(x.mask, x.shape, x.q.device)
        known = self._counted.get(what)
        if known is None or known[0].mask is not seen.mask or known[0][1:] != seen[1:]:
            self._counted[what] = known = seen, count()
        return known[1]

    def among(self, ids: Int[Tensor, "v"]) -> Bool[Tensor, "b n"]:
        """The places of some tokens, the first place of a sequence aside."""
        assert self.ids is not None
        # Every layer asks for the same tokens.
        known = self._among.get(id(ids))
        if known is not None and known[0] is ids:
            return known[1]
        found = torch.isin(self.ids, ids.to(self.ids.device, non_blocking=True)) & self.real
        found[torch.arange(len(found), device=found.device), self.first] = False
        self._among[id(ids)] = ids, found
        return found


class Sides(NamedTuple):
    """What a call compares. `own` says that a text looks at itself."""

    query: Side
    key: Side
    own: bool
