"""Laws of questions: however large the logits are, all answers are about the same weights.

Float32 rounds a logit of thousands by more than weights can bear, and each product of matrices
rounds it in another way; so these laws are where answers of different questions part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.parity.answers import assert_one_answer
from torch import Tensor
from torch.testing import assert_close

import regard
from regard import biases, masks, scores
from regard.backends.exactness import SURE
from regard.monitoring.telemetry import Telemetry
from regard.seen import Statistics

every_backend = pytest.mark.parametrize("backend", ["reference", "tiled", "uncompiled"])

SIZES = (1.0, 10.0, 1e2, 3e3, 1e5, 1e9, 1e15)
EXTRAS = (
    "plain", "softcap", "sink", "large-sink", "relative", "dense", "hidden-by-a-number", "cosine",
    "distance", "far", "additive", "collapsed",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    size: float
    extra: str
    causal: bool
    group: int
    half: bool
    Q: int
    K: int
    seed: int

    def numbers(self, *shape: int, salt: int = 0) -> Tensor:
        source = torch.Generator().manual_seed(1000 * salt + self.seed)
        dtype = torch.bfloat16 if self.half else torch.float32
        return torch.randn(*shape, generator=source).to(dtype)

    def trace(self, backend: str) -> regard.Trace:
        D, H = 16, 2 * self.group
        q = self.size * self.numbers(2, H, self.Q, D, salt=1)
        k = self.size * self.numbers(2, 2, self.K, D, salt=2)
        if self.extra == "collapsed":
            # All keys are nearly one: logits are large, their differences small.
            k = self.size * self.numbers(2, 2, 1, D, salt=2) + self.numbers(2, 2, self.K, D) / D
        v = self.numbers(2, 2, self.K, 4, salt=3)
        return regard.trace(q, k, v, backend=backend, **self.options(H, D))

    def options(self, H: int, D: int) -> dict[str, Any]:
        found: dict[str, Any] = {"mask": masks.causal() if self.causal else None}
        match self.extra:
            case "softcap":
                found["softcap"] = 30.0
            case "sink":
                found["sink"] = self.numbers(H, salt=4)
            case "large-sink":
                found["sink"] = self.size * self.size * self.numbers(H, salt=4)
            case "relative":
                found["bias"] = biases.relative(self.numbers(H, 5, salt=5))
            case "dense":
                found["bias"] = biases.dense(self.size * self.numbers(self.Q, self.K, salt=5))
            case "hidden-by-a-number":
                # As models hide padding, of whole rows too.
                bias = torch.zeros(self.Q, self.K)
                bias[:, self.K // 2 :] = -1e9
                bias[self.Q // 2] = -1e9
                found["bias"] = biases.dense(bias)
            case "cosine":
                found["score"] = scores.cosine(1 / self.size)
            case "distance":
                found["score"] = scores.distance()
            case "far":
                found["score"] = scores.distance(squared=False)
            case "additive":
                w = [self.numbers(H, D, 3, salt=6), self.numbers(H, D, 3, salt=7)]
                w[1] = w[1][0] if self.group > 1 else w[1]
                weight = self.size * self.size * self.numbers(H, 3, salt=8)
                found["score"] = scores.additive(*w, weight)
        return found


@st.composite
def calls(draw: st.DrawFn, extras: tuple[str, ...] = EXTRAS) -> Call:
    return Call(
        size=draw(st.sampled_from(SIZES)),
        extra=draw(st.sampled_from(extras)),
        causal=draw(st.booleans()),
        group=draw(st.sampled_from([1, 2])),
        half=draw(st.booleans()),
        Q=draw(st.sampled_from([1, 5, 40])),
        K=draw(st.sampled_from([1, 7, 40, 150])),
        seed=draw(st.integers(0, 99)),
    )


@pytest.fixture(autouse=True)
def _inner_loop(request: pytest.FixtureRequest) -> None:
    if "uncompiled" in request.node.name:
        request.getfixturevalue("uncompiled")


def traced(call: Call, backend: str) -> regard.Trace:
    return call.trace("tiled" if backend == "uncompiled" else backend)


def plain(size: float, **changes: Any) -> Call:
    like = Call(size, "plain", causal=False, group=1, half=False, Q=40, K=150, seed=0)
    return Call(**(like.__dict__ | changes))


@every_backend
@given(call=calls())
@example(call=plain(3e3))
@example(call=plain(1e2, causal=True))
@example(call=plain(3e3, extra="collapsed"))
@example(call=plain(1e15, extra="collapsed"))
@example(call=plain(1.0, extra="hidden-by-a-number"))
def test_all_questions_about_a_pair_agree(backend: str, call: Call) -> None:
    assert_one_answer(traced(call, backend))


@every_backend
@given(call=calls())
@example(call=plain(3e3))
@example(call=plain(1e5, half=True))
@example(call=plain(3e3, extra="large-sink"))
def test_statistics_count_no_more_than_shares(backend: str, call: Call) -> None:
    """They do not wait to ask how large logits are, so they are as near as float32 tells."""
    t = traced(call, backend)
    found = Statistics.of(t)
    rows = found.sound
    assert (found.first <= rows * (1 + SURE)).all()
    sink = Telemetry.of(t).sink
    assert (sink <= rows * (1 + SURE)).all()
    assert (found.first >= 0).all()
    if call.extra in ("plain", "sink", "relative", "cosine"):
        # Of these the first key is hardly ever nearly as strong as another.
        assert_close(found.first, t.mass(0).sum((0, 2)), rtol=0.01, atol=0.01)
