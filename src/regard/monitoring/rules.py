"""Rules: when the behaviour of a head should be reported, and what to try then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from statistics import median
from typing import ClassVar, Literal

from regard.errors import RegardError
from regard.monitoring.reports import Finding, Heads, Report

TREND = 4
"""Windows shown in a trend."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A number of each head, and the threshold it must not cross for `lasting` windows in a row.

    Before step `after` it says nothing: young models get time. A rule with `action="raise"` ends
    the training with an error.
    """

    lasting: int = 1
    after: int = 0
    action: Literal["warn", "raise"] = "warn"

    name: ClassVar[str]
    what: ClassVar[str]
    do: ClassVar[str]

    def __post_init__(self) -> None:
        lasts = isinstance(self.lasting, int) and self.lasting >= 1
        if not lasts or self.action not in ("warn", "raise"):
            raise RegardError(
                f"{self.name}: how long it lasts, and what is done then",
                got=f"lasting={self.lasting!r}, action={self.action!r}",
                accepted='1 window or more, "warn" or "raise"',
            )
        if not isinstance(self.after, int) or self.after < 0:
            raise RegardError(
                f"{self.name}: from which step of training on it counts",
                got=f"after={self.after!r}",
                accepted="a whole number, 0 or more",
            )
        for field in fields(self):
            limit = getattr(self, field.name)
            if field.name in ("above", "below") and not isinstance(limit, int | float):
                raise RegardError(
                    f"{self.name}: {field.name}= is its threshold",
                    got=f"{field.name}={limit!r}",
                    accepted="a number",
                )

    def values(self, heads: Heads) -> Sequence[float]:
        """The number that is judged, of each head."""
        raise NotImplementedError

    def excess(self, value: float) -> float:
        """How far a value is beyond the threshold; 0 or less, or NaN, is within."""
        raise NotImplementedError

    @property
    def limit(self) -> str:
        """The threshold in words."""
        raise NotImplementedError

    def breaking(self, history: Sequence[Report]) -> dict[tuple[str, int], float]:
        """The heads that break the rule at the end of a history, with how far they do."""
        if len(history) < self.lasting or history[-1].step < self.after:
            return {}
        windows = [self._beyond(report) for report in history[-self.lasting :]]
        return {
            head: far for head, far in windows[-1].items() if all(head in w for w in windows[:-1])
        }

    def _beyond(self, report: Report) -> dict[tuple[str, int], float]:
        return {
            (path, head): far
            for path, heads in report.layers.items()
            for head, value in enumerate(self.values(heads))
            if (far := self.excess(value)) > 0
        }


@dataclass(frozen=True, kw_only=True)
class _Above(Rule):
    above: float

    def excess(self, value: float) -> float:
        return value - self.above

    @property
    def limit(self) -> str:
        return f"above {self.above:g}{_lasted(self)}"


@dataclass(frozen=True, kw_only=True)
class _Below(Rule):
    below: float

    def excess(self, value: float) -> float:
        return self.below - value

    @property
    def limit(self) -> str:
        return f"below {self.below:g}{_lasted(self)}"


@dataclass(frozen=True, kw_only=True)
class NonFinite(_Above):
    """NaN or infinity among the logits or in the output of a head."""

    above: float = 0
    name = "non-finite attention"
    what = "non-finite rows:"
    do = (
        "look at the steps before this one: a lower learning rate, gradient clipping, bfloat16 "
        "instead of float16"
    )

    def values(self, heads: Heads) -> Sequence[float]:
        return heads.non_finite


@dataclass(frozen=True, kw_only=True)
class LogitExplosion(_Above):
    """Logits so large that softmax picks one key and its gradient vanishes."""

    above: float = 100.0
    name = "logit explosion"
    what = "a logit of"
    do = (
        "Monitor(qk_clip=...), normalised queries and keys (qk_norm), a lower learning rate or a "
        "longer warm-up; see that scores are scaled by 1/√d"
    )

    def values(self, heads: Heads) -> Sequence[float]:
        return heads.max_logit


@dataclass(frozen=True, kw_only=True)
class EntropyCollapse(_Below):
    """A head that looks at one key alone, whatever the query."""

    below: float = 0.05
    name = "entropy collapse"
    what = "normalised entropy"
    do = (
        "a lower learning rate or a longer warm-up, Monitor(qk_clip=...), normalised queries and "
        "keys; if the head should be that sharp, as one that looks at the previous token, a lower "
        "EntropyCollapse(below=...)"
    )

    def values(self, heads: Heads) -> Sequence[float]:
        return heads.entropy


@dataclass(frozen=True, kw_only=True)
class UniformHead(_Above):
    """A head that looks at everything alike, so that it only averages (over-smoothing). Every head
    begins like that: it is told when it lasts, and not in the first thousand steps."""

    above: float = 0.98
    lasting: int = 20
    after: int = 1000
    name = "uniform head"
    what = "normalised entropy"
    do = (
        "a larger learning rate or scale for its queries and keys, fewer heads or layers; see that "
        "positions reach it, and that weight decay does not hold its projections at 0"
    )

    def values(self, heads: Heads) -> Sequence[float]:
        return heads.entropy


@dataclass(frozen=True, kw_only=True)
class SinkHead(_Above):
    """A head that rests on the first key nearly all the time."""

    above: float = 0.95
    lasting: int = 10
    name = "sink head"
    what = "a share on the first key of"
    do = (
        "nothing, if few heads do it: it is how a head abstains. If most do, a learned sink, a "
        "gate on the output, or fewer heads"
    )

    def values(self, heads: Heads) -> Sequence[float]:
        return heads.sink


@dataclass(frozen=True, kw_only=True)
class DeadHead(_Below):
    """A head that gives next to nothing, measured by the median head of its layer, or that sees
    nothing at all."""

    below: float = 0.01
    lasting: int = 10
    name = "dead head"
    what = "an output, beside the median head of its layer, of"
    do = (
        "see whether weight decay or a mask has it at 0; draw its projections anew, or train with "
        "fewer heads"
    )

    def values(self, heads: Heads) -> Sequence[float]:
        each = zip(heads.empty, heads.output, strict=True)
        sizes = [0.0 if empty == 1 else size for empty, size in each]
        known = [size for size in sizes if not math.isnan(size)]
        usual = median(known) if known else math.nan
        return [0.0 if size == 0 else size / usual if usual else math.inf for size in sizes]


_LEAST = 2.0**-40
"""Deviations below count as this."""


@dataclass(frozen=True, kw_only=True)
class ScaleOff(Rule):
    """Logits much wider or narrower than scores divided by √d are: softmax chooses, or averages.

    Queries and keys of variance 1 give scores of variance d, so 1/√d brings their standard
    deviation to 1; trained heads are mostly within 0.5 and 3. Forgotten, it is √d times that (8 for
    heads of width 64); done twice, a √d-th of it. Projections that grew or shrank look the same.
    """

    below: float = 0.1
    above: float = 5.0
    lasting: int = 3
    after: int = 1000
    name = "scale off"
    what = "logits of standard deviation"
    do = (
        "see that scores are divided by √d, and once: forgotten, logits are √d times as wide, and "
        "done twice a √d-th. If they are, its projections grew or shrank: normalised queries and "
        "keys (qk_norm), Monitor(qk_clip=...), weight decay"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.below < self.above:
            raise RegardError(
                f"{self.name}: standard deviations between below= and above= are fine",
                got=f"below={self.below!r}, above={self.above!r}",
                accepted="0 <= below < above",
            )

    def values(self, heads: Heads) -> Sequence[float]:
        return heads.std_logit

    def excess(self, value: float) -> float:
        """As a ratio, so that twice too wide and half as wide as allowed are as far."""
        # A deviation of 0 is far away but not endlessly: else it would be told again and again.
        wide = math.log2(max(value, _LEAST)) - math.log2(self.above)
        narrow = math.log2(self.below) - math.log2(max(value, _LEAST)) if self.below else -math.inf
        return max(wide, narrow)

    @property
    def limit(self) -> str:
        return (
            f"not within {self.below:g} and {self.above:g}{_lasted(self)}; scores divided by √d "
            "begin near 1"
        )


RULES: tuple[Rule, ...] = (
    NonFinite(),
    LogitExplosion(),
    EntropyCollapse(),
    UniformHead(),
    SinkHead(),
    DeadHead(),
    ScaleOff(),
)


@dataclass
class _Told:
    """What was said of a head."""

    far: float
    well_again: bool = False


class Judge:
    """Holds a run against rules. A head that breaks one is told of once; again only when things
    change, that is after it was well again or when it is twice as far gone. Of one layer a rule
    speaks every `quiet` windows at most."""

    def __init__(self, rules: Iterable[Rule], quiet: int) -> None:
        self.rules, self.quiet = tuple(rules), quiet
        self.memory = max([TREND, *(rule.lasting for rule in self.rules)])
        """How many windows are needed."""
        self._told: dict[tuple[Rule, tuple[str, int]], _Told] = {}
        self._spoke: dict[tuple[Rule, str], int] = {}
        """The window in which a rule last spoke of a layer."""
        self._windows = 0

    def findings(
        self,
        history: Sequence[Report],
        spared: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[tuple[Rule, Finding]]:
        """What is to be told at the end of a history, at most one of each rule. Each is asked
        within `spared`, so that one that fails takes nothing from the others."""
        self._windows += 1
        found: list[tuple[Rule, Finding]] = []
        for rule in self.rules:
            with spared():
                finding = self._finding(rule, history)
                found += [] if finding is None else [(rule, finding)]
        return found

    def _finding(self, rule: Rule, history: Sequence[Report]) -> Finding | None:
        found = rule.breaking(history)
        for (of, which), told in self._told.items():
            told.well_again |= of is rule and which not in found
        breaking = {
            which: far
            for which, far in found.items()
            if rule.action == "raise" or self._is_new(rule, which, far)
        }
        if not breaking:
            return None
        for which, far in breaking.items():
            self._told[rule, which] = _Told(far)
            self._spoke[rule, which[0]] = self._windows
        path, head = max(breaking, key=lambda which: breaking[which])
        others: dict[str, tuple[int, ...]] = {}
        for at, other in breaking:
            if (at, other) != (path, head):
                others[at] = (*others.get(at, ()), other)
        trend = tuple(
            rule.values(report.layers[path])[head]
            for report in history[-TREND:]
            if path in report.layers
        )
        return Finding(
            rule.name, history[-1].step, path, head, rule.what, trend[-1], rule.limit, trend,
            others, rule.do,
        )  # fmt: skip

    def _is_new(self, rule: Rule, which: tuple[str, int], far: float) -> bool:
        spoke = self._spoke.get((rule, which[0]))
        if spoke is not None and self._windows - spoke < self.quiet:
            return False
        told = self._told.get((rule, which))
        return told is None or told.well_again or (far >= 2 * told.far and far > told.far)


def _lasted(rule: Rule) -> str:
    return f" for {rule.lasting} windows" if rule.lasting > 1 else ""
