"""What a monitor reports of training, when it looks, and that it gets in nobody's way."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import RegardError, masks
from regard.backends.contract import LearnedRows, Rows
from regard.backends.tiled.second_pass import TiledPass
from regard.backends.tiled.second_pass.chosen_logits import chosen_logits
from regard.calls.remembered import Known
from regard.errors import RegardWarning
from regard.monitoring import QKClip, Report, telemetry
from regard.monitoring.logit_spread import HeadSpread
from regard.monitoring.qk_clip import Kind
from regard.monitoring.rules import LogitExplosion, NonFinite
from regard.monitoring.telemetry import Readings, Telemetry
from regard.watching import Watch
from regard.watching.pytorch import attention_mode
from tests.seen.test_looks import Counted
from tests.watching.test_watch import Model, Plain, X, hooks, model, x

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": masks.causal()},
    "causal from the start": {"mask": masks.causal(offset=0)},
    "window": {"mask": masks.causal() & masks.window(20)},
    "window on both sides": {"mask": masks.window(9, 4)},
    "nothing at first": {"mask": masks.causal() & ~masks.window(3)},
    "documents": {"mask": masks.causal() & masks.documents(torch.arange(150) // 37)},
    "padding": {"mask": masks.padding([150, 61])},
    "causal, padded": {"mask": masks.causal() & masks.padding([61, 131])},
    "window, padded on the left": {
        "mask": masks.keep((torch.arange(150) > 30)[None, None, None])
        & (masks.causal() & masks.window(40))
    },
    "float mask": {"bias": regard.biases.dense(torch.zeros(150, 150).fill_diagonal_(-math.inf))},
    "bias": {"mask": masks.causal(), "bias": regard.biases.alibi(torch.tensor([0.1] * 4))},
    "softcap": {"mask": masks.causal(), "softcap": 2.0},
    "scale": {"scale": 3.0, "mask": masks.causal()},
    "sink": {"mask": masks.causal(), "sink": torch.tensor([0.0, 1.0, 2.0, -1.0])},
    "cosine": {"score": regard.scores.cosine(0.1), "mask": masks.causal()},
}


@pytest.mark.parametrize("keys", [150, 131])
@pytest.mark.parametrize("name", CASES)
def test_telemetry_is_that_of_the_dense_weights(name: str, keys: int) -> None:
    how = CASES[name]
    if keys != 150 and name in ("documents", "padding", "float mask", "window, padded on the left"):
        pytest.skip("a mask of a given length")
    q, k, v = x(2, 4, 150, 8), x(2, 2, keys, 8, seed=1) + 0.3, x(2, 2, keys, 8, seed=2)
    t = regard.trace(q.double(), k.double(), v.double(), **how)
    got = Telemetry.of(t)
    s = _logits(t)
    sees = (s > -math.inf).any(-1)
    many = (s > -math.inf).sum(-1)
    mean = s.masked_fill(s == -math.inf, 0).sum(-1) / many.clamp_min(1)
    places = many + ("sink" in how)
    torch.testing.assert_close(got.mean_logit, (mean * sees).sum((0, 2)))
    room = (places.double().clamp_min(1).log() * sees).sum((0, 2))
    torch.testing.assert_close(got.room, room)
    sink = t.mass(0) + (0 if "sink" not in how else 1 - t.weights().sum(-1))
    torch.testing.assert_close(got.sink, (sink * sees).sum((0, 2)))
    torch.testing.assert_close(got.output, t.out.square().mean(-1).sum((0, 2)))
    assert got.non_finite.tolist() == [0, 0, 0, 0]


def _logits(t: regard.Trace) -> Tensor:
    n = t.inputs.shape
    return chosen_logits(t.inputs, torch.arange(n.Q), torch.arange(n.K))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mean_logits_by_prefix_sums_are_as_exact_as_float32(dtype: torch.dtype) -> None:
    q, k = x(1, 2, 3000, 16).to(dtype), (x(1, 2, 3000, 16, seed=1) + 2).to(dtype)
    t = regard.trace(q, k, k, mask=masks.causal() & masks.window(100))
    got = Telemetry.of(t).mean_logit
    exact = regard.trace(q.double(), k.double(), k.double(), mask=t.mask).mean_logit
    torch.testing.assert_close(got.double(), exact.sum((0, 2)), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_the_spread_of_logits_is_that_of_the_dense_ones(name: str) -> None:
    q, k, v = x(2, 4, 150, 8), x(2, 2, 150, 8, seed=1) + 0.3, x(2, 2, 150, 8, seed=2)
    t = regard.trace(q.double(), k.double(), v.double(), **CASES[name])
    s, hidden = _logits(t), _logits(t) == -math.inf
    many = (~hidden).sum(-1)
    mean = s.masked_fill(hidden, 0).sum(-1) / many.clamp_min(1)
    around = (s - mean[..., None]).masked_fill(hidden, 0).square().sum(-1)
    torch.testing.assert_close(t.std_logit, (around / many.clamp_min(1)).sqrt())
    torch.testing.assert_close(t.min_logit, s.masked_fill(hidden, math.inf).amin(-1))
    variance = (around / (many - 1).clamp_min(1)).sum((0, 2))
    choosing = (many > 1).sum((0, 2)).double()
    walked, summed = HeadSpread.of(t, walk=True), HeadSpread.of(t, walk=False)
    torch.testing.assert_close(walked.variance, variance)
    torch.testing.assert_close(walked.choosing, choosing)
    torch.testing.assert_close(walked.lowest, s.masked_fill(hidden, math.inf).amin((0, 2, 3)))
    if name in ("nothing at first", "documents", "float mask", "bias", "softcap"):
        assert summed.choosing.tolist() == [0, 0, 0, 0]
    else:
        torch.testing.assert_close(summed[:2], (variance, choosing))


@pytest.mark.parametrize(("queries", "keys"), [(70, 150), (150, 70), (33, 32), (1, 9)])
@pytest.mark.parametrize("band", [(-math.inf, 0), (-20, 0), (-40, 25), (-90, -50), (30, 35)])
def test_spread_by_second_moments_of_any_band(
    band: tuple[float, float], queries: int, keys: int
) -> None:
    q, k = x(1, 2, queries, 40).double(), x(1, 1, keys, 40, seed=1).double() + 5
    away = torch.arange(keys) - torch.arange(queries)[:, None]
    dense = regard.trace(q, k, k, mask=masks.keep((away >= band[0]) & (away <= band[1])))
    mask = masks.causal(offset=int(band[1]))
    if band[0] > -math.inf:
        mask &= ~masks.causal(offset=int(band[0]) - 1)
    got = HeadSpread.of(regard.trace(q, k, k, mask=mask), walk=False)
    torch.testing.assert_close(got[:2], HeadSpread.of(dense, walk=True)[:2])


def test_spread_by_second_moments_is_as_exact_as_float32_far_from_zero() -> None:
    """A large mean key moves all logits of a row alike, and must not cost digits."""
    q, k = x(1, 2, 3000, 16), x(1, 2, 3000, 16, seed=1) + 100
    t = regard.trace(q, k, k, mask=masks.causal() & masks.window(100))
    exact = HeadSpread.of(regard.trace(q.double(), k.double(), k.double(), mask=t.mask), walk=True)
    got = HeadSpread.of(t, walk=False).variance
    torch.testing.assert_close(got.double(), exact.variance, rtol=1e-3, atol=0)


def test_the_spread_is_reported_of_one_step_of_a_window_and_the_minimum_if_asked() -> None:
    m = model(is_causal=True)
    with regard.watch(m, keep="traces") as seen:
        m(x(2, 7, 16, seed=0))
    t = seen["layers.0"].trace
    s = t.logits().double()
    rows = [s[b, :, i, : i + 1].var(-1) for b in range(2) for i in range(1, 7)]
    std = torch.stack(rows).mean(0).sqrt()
    for asked in (False, True):
        with regard.Monitor(m, every=3, look=1, logits=asked) as monitor:
            for i in range(3):
                m(x(2, 7, 16, seed=i))
                report = monitor.step()
        assert report is not None
        heads = report.layers["layers.0"]
        assert heads.std_logit == pytest.approx(std.tolist(), rel=1e-4)
        lowest = s.masked_fill(s == -math.inf, math.inf).amin((0, 2, 3)).tolist()
        assert heads.min_logit == (pytest.approx(lowest, rel=1e-4) if asked else ())
        assert ("min_logit" in report.record()["layers"]["layers.0"]) == asked


def test_a_head_that_looks_at_all_keys_alike_has_entropy_one_and_a_sharp_one_zero() -> None:
    q, k = torch.zeros(1, 2, 40, 8), x(1, 2, 40, 8)
    # The second head's queries find the first key beyond doubt.
    k[:, 1, 0], q[:, 1] = 10, 10
    k[:, 1, 1:] = 0
    heads = report_of(q, k)
    assert heads.entropy[0] == pytest.approx(1)
    assert heads.entropy[1] == pytest.approx(0, abs=1e-6)
    assert heads.sink[1] == pytest.approx(1)
    # Uniform over 1, 2, … 40 keys: the mean of 1/n falls on the first.
    assert heads.sink[0] == pytest.approx(sum(1 / n for n in range(1, 41)) / 40)
    assert heads.max_logit == pytest.approx((0, 800 / 8**0.5))
    assert heads.mean_logit[1] == pytest.approx(sum(800 / 8**0.5 / n for n in range(1, 41)) / 40)
    assert heads.empty == heads.non_finite == (0, 0)


class Given(nn.Module):
    """Attention of given queries and keys, with a parameter to train."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.how = q, k, v, how
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self) -> Tensor:
        return regard.attention(self.q * self.weight, self.k, self.v, **self.how)


def report_of(q: Tensor, k: Tensor, v: Tensor | None = None, **how: Any) -> Any:
    m = Given(q, k, x(*k.shape) if v is None else v, **how or {"mask": masks.causal()})
    with regard.Monitor(m, every=1, rules=()) as monitor:
        m()
        report = monitor.step()
    assert report is not None
    return report.layers[""]


def test_empty_and_non_finite_rows_are_counted() -> None:
    q, k, v = x(1, 2, 6, 8), x(1, 2, 6, 8, seed=1), x(1, 2, 6, 8, seed=2)
    q[0, 0, 2] = math.nan
    v[0, 1, 5] = math.inf
    heads = report_of(q, k, v, mask=masks.causal() & ~masks.window(0))
    assert heads.empty == pytest.approx((1 / 6, 1 / 6))
    assert heads.non_finite == (1, 0)
    # The last value is seen once the last key may see itself.
    assert report_of(q, k, v, mask=masks.causal()).non_finite == (1, 1)
    nothing = report_of(q, k, v, mask=masks.causal() & ~masks.causal())
    assert nothing.empty == (1, 1)
    assert all(map(math.isnan, nothing.entropy + nothing.max_logit + nothing.output))


def train(m: nn.Module, monitor: regard.Monitor, steps: int, runs: int = 1) -> Iterator[Any]:
    optimiser = torch.optim.SGD(m.parameters(), lr=0.01)
    for i in range(steps):
        for j in range(runs):
            m(x(2, 7, 16, seed=i * runs + j)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        yield monitor.step()


def test_windows_and_looks() -> None:
    m, reports = model(is_causal=True), []
    with regard.Monitor(m, every=6, look=3, to=reports.append) as monitor:
        attached = [hooks(m) > 0 for _ in train(m, monitor, 13)]
    assert [report.step for report in reports] == [6, 12, 13]
    assert [report.looks for report in reports] == [2, 2, 1]
    # Steps 1, 4, 7, 10 and 13 are looked at; each is prepared when the one before it ends.
    assert [i + 2 for i, on in enumerate(attached) if on] == [4, 7, 10, 13]
    assert hooks(m) == 0
    assert list(reports[0].layers) == ["layers.0", "layers.1"]
    assert list(monitor.history) == reports


def test_a_window_is_the_mean_over_its_rows_and_the_largest_logit() -> None:
    m = model(is_causal=True)
    seen = []
    for i in range(4):
        with regard.watch(m) as one:
            m(x(2, 7, 16, seed=i))
        seen.append(one["layers.0"])
    with regard.Monitor(m, every=4, look=1) as monitor:
        for i in range(4):
            m(x(2, 7, 16, seed=i))
            report = monitor.step()
    assert report is not None
    heads = report.layers["layers.0"]
    room = sum(math.log(n) for n in range(1, 8)) / 7
    entropy = torch.stack([layer.entropy for layer in seen]).mean(0) / room
    assert heads.entropy == pytest.approx(entropy.tolist(), rel=1e-5)
    assert heads.max_logit == pytest.approx(
        torch.stack([layer.max_logit for layer in seen]).amax(0).tolist()
    )
    assert heads.sink == pytest.approx(
        torch.stack([layer.first for layer in seen]).mean(0).tolist(), rel=1e-5
    )


def test_training_is_the_same_with_and_without() -> None:
    plain, watched = model(is_causal=True), model(is_causal=True)
    watched.load_state_dict(plain.state_dict())
    list(train(plain, _Nobody(), 5))
    with regard.Monitor(watched, every=4, look=2) as monitor:
        list(train(watched, monitor, 5))
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [True, False])
def test_frozen_layers_below_others_give_what_pytorch_gives(causal: bool) -> None:
    """Where nothing is learned, too, who watches must not answer in PyTorch's place."""
    m, t = model(is_causal=causal), x(3, 40, 16)
    m.layers[0].requires_grad_(False)
    expected = m(t)
    with regard.Monitor(m, every=1, on_error="raise") as monitor:
        assert torch.equal(m(t), expected)
        monitor.step()
    assert len(monitor.history[-1].layers) == len(m.layers)


class _Nobody:
    def step(self) -> None: ...


@pytest.mark.parametrize("reentrant", [True, False])
def test_accumulated_runs_and_checkpointing_count_once(reentrant: bool) -> None:
    m = Model(Plain(), regard.nn.MultiHeadAttention(16, 2), reentrant=reentrant)
    m.register_parameter("more", nn.Parameter(torch.ones(1)))
    first = m.forward
    m.forward = lambda t: first(t * m.more)  # type: ignore[method-assign]
    counted = []
    measured = []
    own, spread = Readings.of, HeadSpread.of
    with pytest.MonkeyPatch.context() as patch:
        of = staticmethod(lambda t, walk: measured.append(t) or spread(t, walk=walk))
        patch.setattr(HeadSpread, "of", of)
        patch.setattr(Readings, "of", staticmethod(lambda c: counted.extend(c) or own(c)))
        with regard.Monitor(m, every=2, look=1) as monitor:
            list(train(m, monitor, 2, runs=3))
    assert len(counted) == 2 * 3 * 2
    assert len(measured) == 1 * 3 * 2


REAL = torch.tensor([[False] * 3 + [True] * 9, [True] * 12])[:, None, None]
TOGETHER = CASES | {
    "narrow": {"mask": masks.causal() & masks.window(3)},
    "right padding": {"mask": masks.causal() & masks.padding([5, 12])},
    "left padding": {"mask": masks.causal() & masks.keep(REAL)},
    "padding alone": {"mask": masks.padding([0, 9])},
}


@pytest.mark.parametrize(
    "name",
    [
        "full",
        "causal",
        "nothing at first",
        "narrow",
        "sink",
        "scale",
        *(n for n in TOGETHER if n not in CASES),
    ],
)
def test_layers_that_are_read_together_are_what_each_is_alone(name: str) -> None:
    traces = [
        regard.trace(x(2, 4, 9, 8, seed=i), *x(2, 2, 2, 12, 8, seed=i + 9), **TOGETHER[name])
        for i in range(3)
    ]
    traces[1].inputs.q[0, 1, 4] = torch.nan
    assert len({telemetry.kind(t) for t in traces}) == 1
    together, counts = Readings.of(traces), []
    for i, t in enumerate(traces):
        torch.testing.assert_close(
            together.at(i).stacked(), Telemetry.of(t).stacked(), equal_nan=True
        )
    for some in (traces[:2], traces):
        with Counted() as counted:
            Readings.of(some)
        # A view of the first key for each.
        counts.append(counted.many - len(some))
    assert counts[0] == counts[1]
    more = together.plus(together).at(2)
    alone = Telemetry.of(traces[2])
    want = {name: 2 * value for name, value in vars(alone.statistics).items()}
    want["max_logit"] = alone.statistics.max_logit
    torch.testing.assert_close(vars(more.statistics), want)
    torch.testing.assert_close(more.room, 2 * alone.room)


def test_a_layer_that_runs_twice_is_read_twice() -> None:
    m = model(is_causal=True)
    twice = nn.Sequential(m, m)
    monitor = regard.Monitor(twice, every=1, rules=())
    twice(X).sum().backward()
    found = monitor._watch.taken()
    assert [(paths, int(read.at(0).statistics.rows[0])) for paths, read in found.items()] == [
        (("0.layers.0", "0.layers.1"), 2 * len(X) * X.shape[1])
    ]
    monitor.close()


def test_evaluation_is_not_looked_at() -> None:
    m = model()
    with regard.Monitor(m, every=1) as monitor:
        m(X)
        with torch.no_grad():
            m(X * 100)
        with torch.inference_mode():
            m(X * 100)
        report = monitor.step()
    with regard.watch(m) as seen:
        m(X)
    assert report is not None
    want = seen["layers.0"].max_logit.tolist()
    assert report.layers["layers.0"].max_logit == pytest.approx(want)


def test_autocast() -> None:
    m = model(is_causal=True)
    with regard.Monitor(m, every=1) as monitor:
        with torch.autocast("cpu", torch.bfloat16):
            m(X).sum().backward()
        report = monitor.step()
    assert report is not None
    assert all(0 < share <= 1.001 for share in report.layers["layers.0"].entropy)


class Waits(TorchDispatchMode):
    """Notes what would have the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique2"):
            self.found.append(name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("clip", [None, 0.01], ids=["plain", "clip"])
def test_no_step_but_the_last_of_a_window_waits_for_the_device(
    clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = Model(regard.nn.MultiHeadAttention(16, 4, kv_heads=2), regard.nn.MultiHeadAttention(16, 2))
    copies: list[str] = []
    for name in ("cpu", "item", "tolist", "numpy"):
        own = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda t, *a, own=own, name=name: copies.append(name) or own(t, *a)
        )
    with regard.Monitor(m, every=4, look=1, qk_clip=clip, rules=()) as monitor:
        for i in range(4):
            m(X).square().mean().backward()
            own_calls = len(copies)
            with Waits() as waits:
                monitor.step()
            waited = bool(waits.found) or len(copies) > own_calls
            assert waited == (i == 3), (i, waits.found, copies)


def test_a_longer_batch_of_ids_is_not_compared_with_the_last() -> None:
    embedded = nn.Sequential(nn.Embedding(9, 16), model(is_causal=True))
    with regard.Monitor(embedded, every=4, look=1, rules=()) as monitor, Waits() as waits:
        for n in (3, 5, 7):
            embedded(torch.zeros(2, n, dtype=torch.int64)).sum().backward()
            monitor.step()
    assert not waits.found


def test_what_is_taken_from_a_call_does_not_wait_for_the_device() -> None:
    q, k, v = x(3, 1, 4, 20, 8)
    padded = masks.causal() & masks.keep((torch.arange(20) > 3)[None, None, None])
    for how in (
        {},
        {"mask": masks.causal()},
        {"mask": masks.causal() & masks.window(3)},
        {"mask": masks.causal() & masks.padding([12])},
        {"mask": padded},
    ):
        t = regard.trace(q, k, v, **how)
        with Waits() as waits:
            Telemetry.of(t)
        assert not waits.found


@pytest.mark.parametrize("size", [1e2, 3e3, 1e6])
def test_the_sink_of_a_run_that_explodes_is_a_share(size: float) -> None:
    q, k = (size * t for t in x(2, 1, 2, 200, 64))
    heads = report_of(q, k, mask=masks.causal())
    wanted = regard.trace(q, k, k, mask=masks.causal()).mass(0).mean((0, 2))
    assert min(heads.max_logit) > size
    assert max(wanted) <= 1
    assert heads.sink == pytest.approx(wanted.tolist(), rel=1e-3, abs=1e-4)


def test_reports_as_records_and_curves() -> None:
    m = model(is_causal=True)
    with regard.Monitor(m, every=2, look=1) as monitor:
        report = list(train(m, monitor, 2))[-1]
    record = json.loads(json.dumps(report.record(), allow_nan=False))
    assert record["step"] == 2
    assert record["looks"] == 2
    layer = record["layers"]["layers.1"]
    assert set(layer) == {
        "max_logit", "mean_logit", "entropy", "sink", "empty", "non_finite", "output", "clipped",
        "std_logit",
    }  # fmt: skip
    assert all(len(each) == 2 for each in layer.values())
    curves = report.scalars()
    assert curves["attention/layers.1/max_logit"] == max(layer["max_logit"])
    assert curves["attention/layers.1/entropy_min"] == min(layer["entropy"])
    assert curves["attention/layers.1/entropy"] == pytest.approx(sum(layer["entropy"]) / 2)
    assert len(curves) == 2 * 14
    each = report.scalars(heads=True)
    assert each["attention/layers.0/sink/head_1"] == report.layers["layers.0"].sink[1]
    assert len(each) == 2 * (14 + 9 * 2)
    lines = repr(report).splitlines()
    assert lines[0] == "step 2, 2 looked at"
    assert [line.split()[0] for line in lines[1:]] == ["layer", "layers.0", "layers.1"]


def test_a_record_has_null_for_what_is_not_finite(tmp_path: Path) -> None:
    q = x(1, 2, 6, 8)
    m = Given(q, q, q, mask=masks.causal() & ~masks.causal())
    with regard.Monitor(m, every=1, to=tmp_path / "run.jsonl", rules=()) as monitor:
        m()
        monitor.step()
    record = json.loads((tmp_path / "run.jsonl").read_text())
    assert record["layers"][""]["entropy"] == [None, None]


def test_steps_counted_elsewhere() -> None:
    m, reports = model(), []
    with regard.Monitor(m, every=2, look=1, to=reports.append) as monitor:
        for step in (1000, 1003, 1006, 1009):
            m(X)
            monitor.step(step)
    assert [report.step for report in reports] == [1003, 1009]


def test_some_layers() -> None:
    m = model()
    with regard.Monitor(m, every=1, layers=["*.1"]) as monitor:
        m(X)
        report = monitor.step()
    assert report is not None
    assert list(report.layers) == ["layers.1"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "look beyond": ({"every": 5, "look": 7}, "look=7, every=5"),
    "every 0": ({"every": 0}, "every=0"),
    "every text": ({"every": "50"}, "every= counts steps\n  got:      every='50'"),
    "every half": ({"every": 2.5}, "every=2.5"),
    "every bool": ({"every": True}, "every=True"),
    "look text": ({"look": "2"}, "look='2'"),
    "look 0": ({"look": 0}, "look=0"),
    "quiet": ({"quiet": None}, "quiet= counts windows"),
    "to number": ({"to": 3}, "to= says where reports go"),
    "to bytes": ({"to": b"run.jsonl"}, "to= says where reports go\n  got:      b'run.jsonl'"),
    "to a list": ({"to": [print, 5.0]}, "got:      5.0"),
    "rules text": ({"rules": "LogitExplosion"}, "rules= are thresholds"),
    "rules of text": ({"rules": ["LogitExplosion"]}, r"\[LogitExplosion\(above=50\)\]"),
    "rules classes": ({"rules": [NonFinite]}, "rules= are thresholds"),
    "rules one": ({"rules": NonFinite()}, "rules= are thresholds"),
    "rules none": ({"rules": None}, r"or \(\) for none"),
    "clip 0": ({"qk_clip": 0.0}, "a number above 0"),
    "clip text": ({"qk_clip": "100"}, "qk_clip= is the largest logit"),
    "clip bool": ({"qk_clip": True}, "qk_clip= is the largest logit"),
    "layers numbers": ({"layers": [1]}, "layers= names modules by their paths"),
    "layers number": ({"layers": 1}, "layers= names modules by their paths"),
    "group": ({"group": "all"}, "group= are the processes"),
    "on_error": ({"on_error": "ignore"}, '\'ignore\'\n  accepted: "warn" or "raise"'),
    "logits": ({"logits": "min"}, "'min'\n  accepted: True or False"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_other_kinds_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    how, words = WRONG[name]
    m = model()
    with pytest.raises(RegardError, match=words):
        regard.Monitor(m, **how)
    assert hooks(m) == 0


def test_what_is_no_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(RegardError, match=r"a torch\.nn\.Module"):
        regard.Monitor("gpt2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"threshold": "5"}, "QK-clip has a threshold for logits"),
        ({"threshold": math.nan}, "QK-clip has a threshold for logits"),
        ({"layers": [2]}, "layers= names modules by their paths"),
        ({"projections": 2}, "projections= finds the projections of a module"),
    ],
)
def test_a_clip_of_other_kinds_is_refused(
    how: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(RegardError, match=words):
        QKClip(**how)


def told_of(run: Callable[[], Any], *words: str) -> None:
    """Each of these words is in one warning, in this order, and there are no others."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
    assert [w.category for w in told] == [RegardWarning] * len(words)
    for warning, word in zip(told, words, strict=True):
        assert re.search(word, str(warning.message)), warning.message


def test_a_model_whose_attention_is_not_seen_is_trained_on() -> None:
    linear = nn.Linear(16, 16)
    with regard.Monitor(linear, every=1) as monitor:
        linear(X)
        told_of(monitor.step, r"(?s)looking at the model; training goes on.*no attention was seen")
        linear(X)
        told_of(monitor.step)
    with regard.Monitor(linear, every=1, on_error="raise") as monitor:
        linear(X)
        with pytest.raises(RegardError, match="the model ran, but no attention was seen"):
            monitor.step()


def test_a_closed_monitor_says_so_once() -> None:
    monitor, strict = regard.Monitor(model()), regard.Monitor(model(), on_error="raise")
    monitor.close()
    strict.close()
    told_of(monitor.step, "this monitor is closed")
    told_of(monitor.step)
    with pytest.raises(RegardError, match="this monitor is closed"):
        strict.step()


def broken(*_: Any, **__: Any) -> Any:
    raise OSError("no space left")


PLACES: dict[str, tuple[Any, str]] = {
    "statistics": (Readings, "of"),
    "kinds": (Kind, "of"),
    "tracing": (attention_mode, "_traced"),
    "entering": (Watch, "enter"),
    "leaving": (Watch, "leave"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_looking_changes_nothing_but_what_is_reported(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = PLACES[place]
    plain = dropping()
    list(train(plain, _Nobody(), 4))
    watched = dropping()
    monitor = regard.Monitor(watched, every=2, look=1)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, staticmethod(broken) if isinstance(owner, type) else broken)
        run = train(watched, monitor, 4)
        told_of(
            lambda: next(run),
            r"failed while looking at the model; training goes on \(on_error=\"raise\" would end "
            r"it\)\n  OSError: no space left\n  at:       .*test_monitor.py:\d+, in broken",
        )
        rest = list(run)
    assert rest[0] is not None
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    # Once it can look again, it does.
    watched(X)
    monitor.step()
    watched(X)
    report = monitor.step()
    assert report is not None
    assert list(report.layers) == ["layers.0"]
    monitor.close()
    assert hooks(watched) == 0


def dropping() -> Model:
    """A model whose attention draws random numbers, the same ones each time it is made."""
    torch.manual_seed(5)
    return Model(Plain(dropout_p=0.5)).train()


@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_looking_ends_the_run_if_asked_to(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = PLACES[place]
    m = dropping()
    monitor = regard.Monitor(m, every=2, look=1, on_error="raise")
    monkeypatch.setattr(owner, name, staticmethod(broken) if isinstance(owner, type) else broken)
    with pytest.raises(OSError, match="no space left"):
        list(train(m, monitor, 1))
    monkeypatch.undo()
    monitor.close()


def test_weights_that_a_module_gives_are_looked_at_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m = nn.MultiheadAttention(16, 2, batch_first=True)
    right = m(X, X, X)
    monitor = regard.Monitor(m, every=1)
    monkeypatch.setattr(attention_mode, "_traced", broken)
    got = m(X, X, X)
    torch.testing.assert_close(got, right)
    told_of(monitor.step, "no space left")


def test_a_monitor_that_cannot_be_made_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m, failing = model(), Failing()
    failing.close = lambda: setattr(failing, "closed", True)  # type: ignore[method-assign]
    calls = iter((nn.Module.register_forward_hook,))
    monkeypatch.setattr(
        nn.Module, "register_forward_hook", lambda *a, **o: next(calls, broken)(*a, **o)
    )
    with pytest.raises(OSError, match="no space left"):
        regard.Monitor(m, to=failing)
    assert failing.closed
    assert hooks(m) == 0


class Failing:
    def __init__(self) -> None:
        self.closed = False

    def write(self, report: Report) -> None:
        raise OSError("no space left")

    def close(self) -> None:
        self.closed = True
        raise OSError("cannot close")


def test_an_error_of_writing_keeps_nobody_else_from_writing(tmp_path: Path) -> None:
    m, failing, path = model(), Failing(), tmp_path / "run.jsonl"
    monitor = regard.Monitor(m, every=1, to=[failing, path])
    m(X)
    told_of(monitor.step, r"writing a report \(Failing\)")
    m(X)
    told_of(monitor.step)
    told_of(monitor.close, "lost.*\n.*Failing, steps 1, 2", "cannot close")
    assert failing.closed
    assert len(path.read_text().splitlines()) == 2
    assert hooks(m) == 0
    strict = regard.Monitor(m, every=1, to=Failing(), on_error="raise")
    m(X)
    with pytest.raises(OSError, match="no space left"):
        strict.step()
    with pytest.raises(OSError, match="cannot close"):
        strict.close()


class Odd(NonFinite):
    def values(self, heads: Any) -> Any:
        raise KeyError("no such number")


def test_an_error_of_a_rule_costs_its_findings_only() -> None:
    m = model()
    with regard.Monitor(m, every=1, rules=[Odd(), LogitExplosion(above=-9), Odd()]) as monitor:
        m(X)
        told_of(
            monitor.step, r"(?s)judging a report.*KeyError: 'no such number'", "logit explosion"
        )
    assert [finding.rule for finding in monitor.history[0].findings] == ["logit explosion"]
    assert list(monitor.history[0].layers) == ["layers.0", "layers.1"]


def test_a_step_that_is_no_number_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    m, reports = model(), []
    with regard.Monitor(m, every=1, to=reports.append) as monitor:
        m(X)
        monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
        told_of(lambda: monitor.step("three"), "step= is the number of the step")  # type: ignore[arg-type]
        m(X)
        monitor.step(torch.tensor(7))  # type: ignore[arg-type]
    assert [report.step for report in reports] == [1, 7]


def test_a_run_that_explodes_is_reported_as_such(tmp_path: Path) -> None:
    q, k = x(1, 4, 6, 8), x(1, 4, 6, 8, seed=1)
    q[0, 0, 3], k[0, 0, 3] = 1e30, 1e30
    q[0, 1, 2] = math.nan
    q[0, 2] = math.nan
    m = Given(q, k, x(1, 4, 6, 8), mask=masks.causal() & masks.padding([6]))
    with regard.Monitor(m, every=1, to=tmp_path / "run.jsonl") as monitor:
        m()
        told_of(monitor.step, "non-finite attention", r"(?s)logit explosion.*a logit of inf")
    heads = monitor.history[0].layers[""]
    assert heads.max_logit[0] == math.inf
    assert math.isnan(heads.max_logit[1])
    assert heads.non_finite[1:] == (1, 6, 0)
    layer = json.loads((tmp_path / "run.jsonl").read_text())["layers"][""]
    assert layer["max_logit"][:3] == ["Infinity", "NaN", "NaN"]
    # The second head has sound rows, of which the rest is said; the third has none.
    assert 0 <= layer["sink"][1] <= 1
    assert layer["sink"][2] == layer["entropy"][2] == layer["output"][2] == "NaN"
    assert layer["max_logit"][3] == heads.max_logit[3]
    assert [float(word) for word in layer["max_logit"][:1]] == [math.inf]
    line = repr(monitor.history[0]).splitlines()[-1]
    assert line.split()[1] == "nan"


def test_a_monitor_shows_its_last_report() -> None:
    m = model()
    monitor = regard.Monitor(m, every=2, look=1, qk_clip=50)
    start = "Monitor(Model, step {}, looks every 1, reports every 2, qk_clip=50{})"
    assert repr(monitor) == start.format(0, "")
    assert monitor._repr_html_() == f"<p>{start.format(0, '')}</p>"
    report = list(train(m, monitor, 2))[-1]
    assert repr(monitor) == f"{start.format(2, '')}\n{report!r}"
    table = monitor._repr_html_()
    assert table.startswith(f"<p>{start.format(2, '')}</p><table>")
    assert table.count("<tr>") == 3
    for cell in ("max logit", "layers.0", "layers.1", "step 2, 2 looked at"):
        assert cell in table
    monitor.close()
    assert repr(monitor).startswith(start.format(2, ", closed"))


def test_what_is_shown_is_escaped_and_tells_what_broke_a_rule() -> None:
    m = nn.ModuleDict({"<b>": model()})
    m.forward = lambda t: m["<b>"](t)  # type: ignore[method-assign]
    rule = LogitExplosion(above=-100)
    with regard.Monitor(m, every=1, rules=[rule]) as monitor:
        m(X)
        told_of(monitor.step, "logit explosion")
    shown = monitor._repr_html_()
    assert "<b>" not in shown
    assert "&lt;b&gt;.layers.0" in shown
    assert "<pre>logit explosion at step 1" in shown


def test_a_step_that_ran_nothing_is_no_error() -> None:
    m = model()
    with regard.Monitor(m, every=1) as monitor:
        report = monitor.step()
        assert report is not None
        assert report.looks == 0
        m(X)
        monitor.step()
    assert len(monitor.history) == 1


def test_a_rule_that_raises_is_written_first_and_leaves_the_model_alone(tmp_path: Path) -> None:
    m, path = model(), tmp_path / "run.jsonl"
    monitor = regard.Monitor(m, every=1, to=path, rules=[NonFinite(action="raise")])
    m(X * math.nan)
    with pytest.raises(RegardError, match=r"non-finite attention at step 1: layers\.0, head 0"):
        monitor.step()
    assert hooks(m) == 0
    monitor.close()
    assert json.loads(path.read_text())["findings"][0]["rule"] == "non-finite attention"


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_models_run_their_graph_between_looks() -> None:
    made = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    m = model(is_causal=True)
    compiled = torch.compile(m, backend=backend)
    with regard.Monitor(compiled, every=4, look=2) as monitor:
        graphs = []
        for _ in range(12):
            compiled(X).square().mean().backward()
            monitor.step()
            graphs.append(len(made))
    assert graphs[-1] == graphs[2], "looking and not looking each compile once"
    assert [report.looks for report in monitor.history] == [2, 2, 2]
    assert list(monitor.history[0].layers) == ["_orig_mod.layers.0", "_orig_mod.layers.1"]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, t: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, t, use_reentrant=False)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("around", [True, False], ids=["compiled", "compiled inside"])
def test_what_a_compiled_model_runs_again_is_counted_once(around: bool) -> None:
    m = model(is_causal=True)
    if around:
        run = torch.compile(Checkpointed(m), backend="aot_eager")
    else:
        m.compile(backend="aot_eager")
        run = Checkpointed(m)
    with regard.Monitor(run, every=2, look=1, rules=(), on_error="raise") as monitor:
        for _ in range(2):
            run(X).square().mean().backward()
            rows = [
                int(read.at(i).statistics.rows[0])
                for paths, read in monitor._watch._found.items()
                for i in range(len(paths))
            ]
            assert rows == [len(X) * X.shape[1]] * 2
            monitor.step()


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore::regard.errors.RegardWarning")
def test_a_compiled_encoder_is_trained_on_whether_or_not_it_is_seen() -> None:
    m = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    compiled = torch.compile(m, backend="eager")
    with regard.Monitor(compiled, every=1) as monitor:
        for _ in range(3):
            compiled(X).square().mean().backward()
            assert monitor.step() is not None


def test_a_report_is_given_to_whoever_asks() -> None:
    m = model()
    with regard.Monitor(m, every=2, look=1) as monitor:
        found = list(train(m, monitor, 2))
    assert found[0] is None
    assert isinstance(found[1], Report)
    assert found[1] == monitor.history[-1]


@pytest.mark.parametrize("hidden", [-1e9, -1e4, torch.finfo(torch.float32).min])
def test_large_negative_numbers_hide_as_minus_infinity_does(hidden: float) -> None:
    def told(value: float) -> dict[str, Any]:
        q, k = (
            torch.randn(2, 4, 14, 8, generator=torch.Generator().manual_seed(i)) for i in (1, 2)
        )
        mask = torch.full((14, 14), value).triu(1)
        of = regard.trace(q, k, k, bias=regard.biases.dense(mask))
        found = Telemetry.of(of)
        return {name: getattr(found, name) for name in ("mean_logit", "room", "sink")}

    want, got = told(-math.inf), told(hidden)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)


@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_rows_that_large_negative_numbers_hide_whole_are_empty(sink: torch.Tensor | None) -> None:
    q, k = (torch.randn(2, 4, 14, 8, generator=torch.Generator().manual_seed(i)) for i in (1, 2))

    def told(value: float) -> torch.Tensor:
        """Left padding, as float masks have it: the rows of the padding see no key."""
        mask = torch.full((14, 14), value).triu(1)
        mask[:, :3] = value
        of = regard.trace(q, k, k, bias=regard.biases.dense(mask), sink=sink)
        return Telemetry.of(of).stacked()

    want, got = told(-math.inf), told(-1e9)
    assert want[1].tolist() == [6.0] * 4
    torch.testing.assert_close(got, want)


class Called(Plain):
    """Attention by a call of ours."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = regard.attention(q, k, v, mask=masks.causal())
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("who", ["monitor", "monitor, QK-clip", "statistics", "traces"])
def test_who_only_looks_has_nothing_learn_from_statistics(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they join autograd's graph only once they are asked for, that would take longer than to
    look."""
    seen = []
    traced = Known._traced

    def later(self: Known, inputs: Any, rows: Rows, mask: Any) -> regard.Trace:
        def joined() -> Rows:
            raise AssertionError("nobody wants a gradient")

        if torch.is_grad_enabled() and rows.out.requires_grad:
            seen.append(rows)
            rows = LearnedRows(rows, joined)
        return traced(self, inputs, rows, mask)

    monkeypatch.setattr(Known, "_traced", later)
    # A GPU adds up what all rows say.
    monkeypatch.setattr(TiledPass, "head_sums", lambda self, inputs, rows: (tuple(rows), None)[1])
    net = Model(Called(), Called())
    if who.startswith("monitor"):
        clip = {"qk_clip": 100.0} if "clip" in who else {}
        how = {"every": 4, "look": 1, "on_error": "raise"} | clip
        with regard.Monitor(net, **how) as monitor:  # type: ignore[arg-type]
            for _ in range(4):
                net(X).sum().backward()
                report = monitor.step()
        assert report is not None
    else:
        with regard.watch(net, keep=who) as found:  # type: ignore[arg-type]
            for _ in range(4):
                net(X).sum().backward()
        assert all(layer.entropy.isfinite().all() for layer in found.values())
    assert len(seen) >= 3
