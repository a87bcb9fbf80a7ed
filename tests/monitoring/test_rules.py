"""Rules: what breaks them, what they say, and how often."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard import RegardError, RegardWarning
from regard.monitoring.reports import Heads, Report
from regard.monitoring.rules import (
    RULES,
    DeadHead,
    EntropyCollapse,
    Judge,
    LogitExplosion,
    NonFinite,
    Rule,
    ScaleOff,
    SinkHead,
    UniformHead,
)

FINE: dict[str, tuple[float, ...]] = {
    "max_logit": (5, 6), "mean_logit": (0, 0), "entropy": (0.5, 0.6), "sink": (0.1, 0.2),
    "empty": (0, 0), "non_finite": (0, 0), "output": (1, 1), "clipped": (0, 0),
    "std_logit": (1, 2),
}  # fmt: skip


def report(step: int = 50, **layers: dict[str, tuple[float, ...]]) -> Report:
    return Report(step, 5, {path: Heads(**FINE | changed) for path, changed in layers.items()})


BROKEN: list[tuple[type[Rule], dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]]] = [
    (NonFinite, {"non_finite": (0, 1)}, {"non_finite": (0, 0)}),
    (LogitExplosion, {"max_logit": (99, 101)}, {"max_logit": (100, 100)}),
    (EntropyCollapse, {"entropy": (0.05, 0.049)}, {"entropy": (0.05, math.nan)}),
    (UniformHead, {"entropy": (0.98, 0.981)}, {"entropy": (0.98, math.nan)}),
    (SinkHead, {"sink": (0.95, 0.951)}, {"sink": (0.95, 0.95)}),
    (DeadHead, {"output": (2, 0.009)}, {"output": (1, 0.02)}),
    (ScaleOff, {"std_logit": (5, 5.01)}, {"std_logit": (0.1, math.nan)}),
    (ScaleOff, {"std_logit": (0.1, 0.099)}, {"std_logit": ()}),
    (ScaleOff, {"std_logit": (5, 0.0)}, {"std_logit": (5, 5)}),
]


@pytest.mark.parametrize(
    ("kind", "bad", "good"), BROKEN, ids=lambda part: getattr(part, "name", "")
)
def test_each_rule_fires_beyond_its_threshold_and_not_at_it(
    kind: type[Rule], bad: dict[str, Any], good: dict[str, Any]
) -> None:
    rule = kind(lasting=1)
    assert set(rule.breaking([report(5000, a={}, b=bad)])) == {("b", 1)}
    assert rule.breaking([report(5000, a={}, b=good)]) == {}


def test_the_rules_in_use() -> None:
    assert [rule.name for rule in RULES] == [
        "non-finite attention", "logit explosion", "entropy collapse", "uniform head", "sink head",
        "dead head", "scale off",
    ]  # fmt: skip
    assert all(rule.action == "warn" for rule in RULES)
    assert Judge(RULES, 20).findings([report(a={})] * 20) == []


def test_a_dead_head_is_one_that_gives_little_or_sees_nothing() -> None:
    rule = DeadHead(lasting=1)
    unseen = {"empty": (0.0, 1.0), "output": (1.0, math.nan)}
    assert set(rule.breaking([report(a=unseen)])) == {("a", 1)}
    assert rule.breaking([report(a={"output": (math.nan, math.nan)})]) == {}
    assert set(rule.breaking([report(a={"output": (0.0, 0.0)})])) == {("a", 0), ("a", 1)}


def test_what_must_last() -> None:
    rule = UniformHead(lasting=3, after=0)
    flat, once = report(a={"entropy": (0.99, 0.5)}), report(a={"entropy": (0.99, 0.99)})
    assert rule.breaking([flat, flat]) == {}
    assert set(rule.breaking([flat, flat, flat])) == {("a", 0)}
    assert set(rule.breaking([flat, flat, once])) == {("a", 0)}
    assert rule.breaking([flat, report(a={}), flat]) == {}
    assert rule.breaking([report(b={}), flat, flat]) == {}


def test_a_finding_says_where_how_much_since_when_and_what_to_try() -> None:
    history = [
        report(50, a={}, b={"max_logit": (8, 30)}),
        report(100, a={}, b={"max_logit": (20, 60)}),
        report(150, a={"max_logit": (120, 3)}, b={"max_logit": (104.2, 201.25)}),
    ]
    [(rule, finding)] = Judge(RULES, 20).findings(history)
    assert isinstance(rule, LogitExplosion)
    assert str(finding) == (
        "logit explosion at step 150: b, head 1 has a logit of 201, above 100\n"
        "  trend:    30 → 60 → 201\n"
        "  also:     a head 0; b head 0\n"
        "  try:      Monitor(qk_clip=...), normalised queries and keys (qk_norm), a lower learning "
        "rate or a longer warm-up; see that scores are scaled by 1/√d"
    )
    assert finding.others == {"a": (0,), "b": (0,)}


def test_many_layers_are_one_finding() -> None:
    bad = {f"layers.{i}": {"entropy": (0.01, 0.02)} for i in range(6)}
    [(_, finding)] = Judge(RULES, 20).findings([report(**bad)])
    assert "and 3 more layers" in str(finding)
    assert "layers.1 heads 0, 1" in str(finding)


def told_of(judge: Judge, *windows: dict[str, Any]) -> list[list[tuple[str, int]]]:
    """The heads that are told of, window by window."""
    found = []
    for layers in windows:
        heads: list[tuple[str, int]] = []
        for _, finding in judge.findings([report(5000, **layers)]):
            heads.append((finding.layer, finding.head))
            heads += [(path, head) for path, others in finding.others.items() for head in others]
        found.append(heads)
    return found


def test_a_head_is_told_of_once_and_another_at_once() -> None:
    bad, both = {"entropy": (0.01, 0.5)}, {"entropy": (0.01, 0.01)}
    windows = [{"a": bad}, {"a": bad}, {"a": bad, "b": bad}, {"a": both}, *[{"a": both}] * 50]
    told = told_of(Judge([EntropyCollapse()], quiet=3), *windows)
    assert told == [[("a", 0)], [], [("b", 0)], [("a", 1)], *[[]] * 50]


def test_a_head_that_was_well_again_is_told_of_again_but_not_too_often() -> None:
    bad, well = {"a": {"entropy": (0.01, 0.5)}}, {"a": {}}
    told = told_of(Judge([EntropyCollapse()], quiet=4), bad, well, bad, well, bad, bad)
    assert told == [[("a", 0)], [], [], [], [("a", 0)], []]


def test_a_head_that_is_twice_as_far_gone_is_told_of_again() -> None:
    windows = [{"a": {"max_logit": (5.0, logit)}} for logit in (150, 190, 199, 201, 260, 290, 302)]
    told = told_of(Judge([LogitExplosion()], quiet=3), *windows)
    assert told == [[("a", 1)], [], [], [("a", 1)], [], [], [("a", 1)]]


def test_what_stays_infinite_is_told_of_once() -> None:
    told = told_of(Judge([LogitExplosion()], quiet=2), *[{"a": {"max_logit": (math.inf, 5.0)}}] * 9)
    assert told == [[("a", 0)], *[[]] * 8]


def test_young_models_get_time() -> None:
    """Every head begins uniform, whatever a window is."""
    flat = {"entropy": (0.99, 0.99)}
    assert not UniformHead().breaking([report(step, a=flat) for step in range(1, 1000)])
    assert UniformHead().breaking([report(step, a=flat) for step in range(1, 1001)])
    assert not UniformHead(lasting=1, after=200).breaking([report(199, a=flat)])
    with pytest.raises(RegardError, match="after=-1"):
        UniformHead(after=-1)


def test_a_rule_that_raises_does_so_each_time() -> None:
    judge = Judge([EntropyCollapse(action="raise")], quiet=3)
    bad = [report(a={"entropy": (0.01, 0.5)})]
    assert [len(judge.findings(bad)) for _ in range(3)] == [1, 1, 1]


def test_thresholds_are_named_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    assert LogitExplosion(above=7).limit == "above 7"
    assert SinkHead(above=0.5, lasting=3).limit == "above 0.5 for 3 windows"
    with pytest.raises(RegardError, match="lasting=0"):
        SinkHead(lasting=0)
    with pytest.raises(RegardError, match='"warn" or "raise"'):
        SinkHead(action="shout")  # type: ignore[arg-type]


class Unscaled(nn.Module):
    """One layer of attention over letters, without the scale of 1/√d."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.embed = nn.Embedding(16, 32)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        e = self.embed(ids)
        parts = (p(e) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in parts)
        y = regard.attention(q, k, v, mask=regard.masks.causal(), scale=self.scale)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("clip", [None, 30.0], ids=["alone", "clipped"])
def test_a_run_that_goes_wrong_is_told_of_and_one_that_is_clipped_is_not(
    clip: float | None,
) -> None:
    torch.manual_seed(0)
    m = Unscaled()
    optimiser = torch.optim.Adam(m.parameters(), lr=0.05)
    rules = [LogitExplosion(above=60), NonFinite()]
    ids = torch.randint(16, (4, 24))
    with (
        warnings.catch_warnings(record=True) as caught,
        regard.Monitor(m, every=5, look=1, qk_clip=clip, rules=rules) as monitor,
    ):
        warnings.simplefilter("always")
        for _ in range(40):
            loss = nn.functional.cross_entropy(m(ids).flatten(0, 1), ids.roll(1, 1).flatten())
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            monitor.step()
    told = [str(w.message) for w in caught if w.category is RegardWarning]
    largest = max(max(report.layers[""].max_logit) for report in monitor.history)
    if clip is None:
        assert len(told) == 1
        assert "logit explosion at step" in told[0]
        assert largest > 60
    else:
        assert not told
        assert largest <= 60
        assert sum(sum(report.layers[""].clipped) for report in monitor.history) > 0


def test_a_scale_that_was_forgotten_or_done_twice_is_told_of_once() -> None:
    """Queries and keys of variance 1 in heads of width 16: logits of deviation 4, 1 and 1/4."""
    rule = ScaleOff(below=0.5, above=2, after=3, lasting=2)
    said = {}
    for scale in (1.0, 1 / 4, 1 / 16):
        torch.manual_seed(0)
        m = Unscaled(scale)
        for projection in (m.q_proj, m.k_proj):
            nn.init.normal_(projection.weight, std=32**-0.5)
        with (
            warnings.catch_warnings(record=True) as caught,
            regard.Monitor(m, every=1, rules=[rule]) as monitor,
        ):
            warnings.simplefilter("always")
            for _ in range(6):
                m(torch.randint(16, (8, 64)))
                monitor.step()
        said[scale] = [str(w.message) for w in caught if w.category is RegardWarning]
        assert monitor.history[0].layers[""].std_logit == pytest.approx([4 * scale] * 2, rel=0.35)
    assert said[1 / 4] == []
    assert [len(said[1.0]), len(said[1 / 16])] == [1, 1]
    assert said[1.0][0].startswith("scale off at step 3: (model), head ")
    assert "not within 0.5 and 2 for 2 windows; scores divided by √d begin near 1" in said[1.0][0]
    with pytest.raises(RegardError, match="0 <= below < above"):
        ScaleOff(below=3, above=2)
