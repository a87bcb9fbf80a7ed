"""What a cache keeps: keys are scored by the attention they get, and the best stay.

Query heads that share a key head share its verdict: the score of a key is the sum over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, pad

from regard.caches.budgets import even, shared
from regard.errors import RegardError
from regard.interpret.rows import received_from
from regard.traces import Trace
from regard.values import whole


@runtime_checkable
class Policy(Protocol):
    """Which slots of a cache stay after a call."""

    @property
    def budget(self) -> int:
        """How many tokens a key head keeps, on average over the heads of a layer."""
        ...

    @property
    def remembers(self) -> bool:
        """Whether a score depends on the calls before."""
        ...

    def score(self, trace: Trace, before: Float[Tensor, "b g s"]) -> Float[Tensor, "b g s"] | None:
        """The score of each slot after a call, from the one before it (0 for new keys); None where
        this call chooses nothing."""
        ...

    def keep(
        self, scores: Float[Tensor, "b g s"], filled: Bool[Tensor, "b g s"]
    ) -> Bool[Tensor, "b g s"]:
        """The slots that stay."""
        ...


@dataclass(frozen=True)
class HeavyHitters:
    """The last `recent` tokens, and those that got most attention from all queries so far, as H2O
    has it; `budget` together. Held after the prompt and after every token that is generated.

    >>> HeavyHitters(256, recent=32)
    HeavyHitters(budget=256, recent=32)
    """

    budget: int
    recent: int

    def __post_init__(self) -> None:
        _check(self, "recent", self.recent)

    @property
    def remembers(self) -> bool:
        return True

    def score(self, trace: Trace, before: Float[Tensor, "b g s"]) -> Float[Tensor, "b g s"]:
        return before + by_key_head(trace, received_from(trace, None, None))

    def keep(
        self, scores: Float[Tensor, "b g s"], filled: Bool[Tensor, "b g s"]
    ) -> Bool[Tensor, "b g s"]:
        return even(scores, filled, self.budget, self.recent)


@dataclass(frozen=True)
class WindowVotes:
    """The last `window` tokens, and those that the last `window` queries look at most, as SnapKV
    has it; `budget` together.

    Votes are pooled over `width` neighbours, so that what surrounds a key stays with it. A vote is
    taken in every call of at least `window` queries: the prompt. What is generated afterwards is
    kept.

    >>> WindowVotes(256)
    WindowVotes(budget=256, window=32, pool='max', width=7)
    """

    budget: int
    window: int = 32
    pool: Literal["max", "mean"] = "max"
    width: int = 7

    def __post_init__(self) -> None:
        _check(self, "window", self.window)
        width = whole("WindowVotes: width", self.width)
        if self.window < 1 or width < 1 or width % 2 != 1:
            raise RegardError(
                "votes are those of the last queries, pooled over neighbours",
                got=f"window={self.window}, width={self.width}",
                accepted="a window of 1 or more, and an odd width",
            )
        if self.pool not in ("max", "mean"):
            raise RegardError("unknown pool", got=repr(self.pool), accepted="'max' or 'mean'")

    @property
    def remembers(self) -> bool:
        return False

    def score(self, trace: Trace, before: Float[Tensor, "b g s"]) -> Float[Tensor, "b g s"] | None:
        _, _, Q, S = trace.inputs.shape
        if self.window > Q:
            return None
        old = S - self.window
        votes = by_key_head(trace, received_from(trace, range(Q - self.window, Q), range(old)))
        pooled = max_pool1d if self.pool == "max" else avg_pool1d
        return pad(pooled(votes, self.width, stride=1, padding=self.width // 2), (0, self.window))

    def keep(
        self, scores: Float[Tensor, "b g s"], filled: Bool[Tensor, "b g s"]
    ) -> Bool[Tensor, "b g s"]:
        return even(scores, filled, self.budget, self.window)


@dataclass(frozen=True)
class PerHead:
    """The same scores, with the budget of a layer shared by its key heads, as AdaKV has it: the
    best keys of all heads stay, so that a head that looks at many things keeps more of them.

    Every head keeps `floor` of the budget, and its latest tokens.

    >>> PerHead(HeavyHitters(256, recent=32))
    PerHead(policy=HeavyHitters(budget=256, recent=32), floor=0.2)
    """

    policy: HeavyHitters | WindowVotes
    floor: float = 0.2

    def __post_init__(self) -> None:
        if not isinstance(self.policy, HeavyHitters | WindowVotes):
            raise RegardError(
                "PerHead shares out the budget of another policy",
                got=repr(self.policy),
                accepted="HeavyHitters(...) or WindowVotes(...)",
            )
        if not isinstance(self.floor, (int, float)) or not 0 <= self.floor <= 1:
            raise RegardError(
                "floor= is the share of the budget that every head keeps",
                got=repr(self.floor),
                accepted="0 to 1",
            )

    @property
    def budget(self) -> int:
        return self.policy.budget

    @property
    def remembers(self) -> bool:
        return self.policy.remembers

    def score(self, trace: Trace, before: Float[Tensor, "b g s"]) -> Float[Tensor, "b g s"] | None:
        return self.policy.score(trace, before)

    def keep(
        self, scores: Float[Tensor, "b g s"], filled: Bool[Tensor, "b g s"]
    ) -> Bool[Tensor, "b g s"]:
        own = self.policy
        latest = own.recent if isinstance(own, HeavyHitters) else own.window
        return shared(scores, filled, own.budget, latest, self.floor)


def by_key_head(trace: Trace, scores: Float[Tensor, "b h s"]) -> Float[Tensor, "b g s"]:
    """Summed over the query heads that share a key head."""
    B, _, S = scores.shape
    return scores.view(B, trace.inputs.k.shape[1], -1, S).sum(2)


def _check(policy: Any, name: str, latest: int) -> None:
    kind = type(policy).__name__
    numbers = whole(f"{kind}: budget", policy.budget), whole(f"{kind}: {name}", latest)
    if not 0 <= numbers[1] <= numbers[0] or numbers[0] < 1:
        raise RegardError(
            f"{kind}: budget= counts the tokens that stay, and the last {name}= are among them",
            got=f"budget={policy.budget}, {name}={latest}",
            accepted=f"0 <= {name} <= budget, and a budget of 1 or more",
        )
