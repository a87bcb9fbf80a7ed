"""Calls that wait and are added up together give what each would have given by itself."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import biases, masks
from regard.backends.contract import Rows, Tabled
from regard.calls.kinds import unshared
from regard.seen import Layer, Waiting, looks, statistics
from regard.traces import Trace

PADDED = masks.causal() & masks.padding([7, 0])
LEFT = masks.causal() & masks.keep(
    torch.tensor([[True] * 9, [False] * 3 + [True] * 6])[:, None, None]
)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "causal from the start": {"mask": masks.causal(offset=0)},
    "some rows see nothing": {"mask": masks.causal(offset=-2)},
    "a window that leaves the first key": {"mask": masks.causal() & masks.window(2)},
    "after the first key": {"mask": ~masks.window(None, 3)},
    "padded": {"mask": PADDED},
    "padded on the left": {"mask": LEFT},
    "another scale": {"mask": PADDED, "scale": 2.0},
    "a bias": {"bias": biases.alibi(torch.tensor([0.5, 0.25, 0.1, 0.05]))},
    "a soft cap": {"softcap": 1.5},
    "a sink": {"sink": torch.tensor([0.0, 1.0, -1.0, 2.0])},
}  # fmt: skip


def traced(seed: int, queries: int = 5, keys: int = 9, **how: Any) -> Trace:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 4, queries, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, keys, 8, generator=generator)
    found = regard.trace(q, k, v, **how)
    # As they are where something is learned: each a tensor of its own.
    return replace(found, rows=Rows(*found.rows))


def added(traces: list[list[Trace]], *, together: bool) -> list[Layer]:
    waiting, layers = Waiting(), [Layer(str(i)) for i in range(len(traces))]
    for call in zip(*traces, strict=True):
        for layer, trace in zip(layers, call, strict=True):
            layer.take(trace, 0, keep=False, waiting=waiting if together else None)
    waiting.settle()
    return layers


def tabled(trace: Trace, *, first: bool) -> Trace:
    """With its statistics in one tensor, as kernels write them."""
    out, lse, max_logit, entropy = trace.rows
    parts = [max_logit, entropy, lse]
    if first:
        parts.append(trace.second_pass.first_logit(trace.inputs))
    return replace(trace, rows=Tabled(out, torch.stack(parts)))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_statistics_in_one_tensor(call: str, first: bool) -> None:
    traces = [[traced(10 * i + j, **CALLS[call]) for j in range(3)] for i in range(2)]
    tables = [[tabled(trace, first=first) for trace in of_layer] for of_layer in traces]
    agree(added(tables, together=True), added(traces, together=False))
    agree(added(tables, together=False), added(traces, together=False))
    one, other = tables[0][0], traces[0][0]
    assert all(map(torch.equal, one.rows, other.rows))
    assert torch.equal(one.rows.lse, other.rows.lse)
    assert torch.equal(copy.deepcopy(one).lse, other.lse)
    assert torch.equal(one[:, 1:].entropy, other[:, 1:].entropy)
    assert one.rows[2] is one.rows.max_logit


@pytest.mark.parametrize("call", CALLS)
def test_statistics_in_one_tensor_beside_others(call: str) -> None:
    """As where some layers learn and others, which are like them, do not."""
    traces = [traced(n, **CALLS[call]) for n in range(4)]
    kinds: list[Callable[[Trace], Trace]] = [
        lambda trace: trace,
        partial(tabled, first=True),
        partial(tabled, first=False),
        lambda trace: trace,
    ]
    mixed = [make(trace) for make, trace in zip(kinds, traces, strict=True)]
    found, wanted = (
        statistics.Sums.of([looks.Looks.of(each) for each in some], 2) for some in (mixed, traces)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("first", [True, False])
def test_other_largest_logits(first: bool) -> None:
    trace = traced(0)
    other = torch.full_like(trace.max_logit, 7.0)
    found = [
        statistics.Sums.of([looks.Looks.of(each).reaching(other)], 1)
        for each in (trace, tabled(trace, first=first))
    ]
    for one, beside in zip(*found, strict=True):
        torch.testing.assert_close(one, beside)
    assert (found[0].largest == 7).all()


def agree(some: list[Layer], others: list[Layer]) -> None:
    for layer, other in zip(some, others, strict=True):
        mine, theirs = layer.statistics, other.statistics
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(vars(mine), vars(theirs))


@pytest.mark.parametrize("name", CALLS)
def test_together_they_are_what_each_is_alone(name: str) -> None:
    how = CALLS[name]
    traces = [[traced(10 * layer + call, **how) for call in range(2)] for layer in range(3)]
    layers = added(traces, together=True)
    agree(layers, added(traces, together=False))
    for layer, several in zip(layers, traces, strict=True):
        sums = layer.statistics
        assert sums is not None
        mass = sum(t.mass(0).masked_fill(t.max_logit == -torch.inf, 0).sum((0, 2)) for t in several)
        torch.testing.assert_close(sums.first, mass, rtol=1e-5, atol=1e-6)


def test_calls_of_other_lengths_masks_and_numbers() -> None:
    steps = [traced(1, 9, 9, mask=PADDED), *(traced(n, 1, 9 + n) for n in range(2, 5))]
    others = [traced(7, 9, 9, mask=masks.causal()), *(traced(n, 1, 20) for n in range(2, 5))]
    agree(added([steps, others], together=True), added([steps, others], together=False))
    waiting, layers = Waiting(), [Layer("a"), Layer("b")]
    for layer, trace in zip([*layers, layers[0]], steps[1:], strict=True):
        layer.take(trace, 0, keep=False, waiting=waiting)
    waiting.settle()
    assert [layer.statistics.rows[0] for layer in layers if layer.statistics] == [4, 2]


def test_long_calls_and_long_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = [[traced(n, mask=masks.causal())] for n in range(3)]
    want = added(traces, together=False)
    for name in ("SMALL", "SHORT"):
        monkeypatch.setattr(looks, name, 0)
        agree(added(traces, together=True), want)
    monkeypatch.setattr(statistics, "MANY", 1)
    agree(added(traces, together=True), want)


def test_rows_that_are_broken_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 6, 4)
    q[0, 0, 2, 1], q[0, 1, 3, 0] = torch.nan, torch.inf
    k = torch.randn(1, 2, 6, 4)
    k[0, 1, 0] = torch.inf
    trace = regard.trace(q, k, k, mask=~masks.causal(offset=-1) & masks.causal(offset=2))
    layers = added([[trace], [trace]], together=True)
    agree(layers, added([[trace], [trace]], together=False))
    assert layers[0].first.isfinite().all()


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.many = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.many += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "mask",
    [None, masks.causal(), masks.causal() & unshared(masks.padding([7, 0]))],
    ids=["none", "causal", "padded"],
)
def test_many_layers_take_as_many_operations_as_few(mask: masks.Mask | None) -> None:
    found = []
    for many in (2, 12):
        traces = [traced(n, mask=mask) for n in range(many)]
        waiting, layers = Waiting(), [Layer(str(n)) for n in range(many)]
        with Counted() as counted:
            for layer, trace in zip(layers, traces, strict=True):
                layer.take(trace, 0, keep=False, waiting=waiting)
            # Copies of the queries and of the first key, so that they stay what they were.
            assert counted.many == 3 * many
            waiting.settle()
        found.append(counted.many - 3 * many)
    assert found[0] == found[1] < 60


def test_what_waits_stays_what_it_was() -> None:
    """Queries and a cache of keys whose memory is used for something else before a run ends."""

    class Reuses(torch.nn.Module):
        def forward(self, x: torch.Tensor, reuse: bool) -> torch.Tensor:
            q, k = x.clone(), x.flip(-1)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, x)
            if reuse:
                q.zero_()
                k.zero_()
            return out

    model, x = Reuses(), torch.randn(1, 2, 5, 8)
    found = []
    for reuse in (False, True):
        with torch.no_grad(), regard.watch(model, keep="statistics") as seen:
            model(x, reuse)
        (layer,) = seen.values()
        found.append(layer.statistics.first)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_masks_that_wait_say_what_they_said(mode: Callable[[], Any]) -> None:
    """A mask that is set anew for each text hides the first key of some of them alone."""

    class Sets(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(5, 5).bool()

        def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
            self.mask[:, 0] = first
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.mask)

    x = torch.randn(1, 2, 5, 8)
    share = (x @ x.mT / 8**0.5).softmax(-1)[0, :, :, 0].sum(-1)
    with mode():
        model = Sets()
        for order in ([True, False], [False, True], [True, True, False]):
            with regard.watch(model, keep="statistics") as seen:
                for first in order:
                    model(x, first)
            (layer,) = seen.values()
            torch.testing.assert_close(layer.statistics.first, share * sum(order))


@pytest.mark.parametrize("through", ["PyTorch", "NumPy"])
def test_documents_that_wait_say_what_they_said(through: str) -> None:
    """They are written to when no call with them has been looked at yet; NumPy does so without
    being counted, for every text."""
    ids = torch.arange(6) // 2
    target = ids if through == "PyTorch" else torch.from_numpy(ids.numpy())
    given = masks.documents(ids)

    class Packs(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return regard.attention(x, x, x, mask=given)

    model, x = Packs(), torch.randn(1, 2, 6, 8)
    logits, found = x @ x.mT / 8**0.5, torch.zeros(2)
    with torch.no_grad(), regard.watch(model, keep="statistics") as seen:
        for size in (3, 6, 1):
            allowed = ids[:, None] == ids
            model(x)
            target.copy_(torch.arange(6) // size)
            found += logits.masked_fill(~allowed, -torch.inf).softmax(-1)[0, :, :, 0].sum(-1)
    (layer,) = seen.values()
    torch.testing.assert_close(layer.statistics.first, found)


def test_a_mask_that_is_one_number_says_what_it_said() -> None:
    """What is worked out of it is a view of it."""
    x = torch.randn(1, 2, 5, 8)
    weights = (x @ x.mT / 8**0.5).softmax(-1)[0, :, :, 0].sum(-1)
    on = torch.tensor(True)

    class Switched(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return regard.attention(x, x, x, mask=masks.where(lambda b, h, q, k: on))

    model = Switched()
    with torch.no_grad(), regard.watch(model) as seen:
        model(x)
        on.fill_(False)
    (layer,) = seen.values()
    torch.testing.assert_close(layer.statistics.first, weights)


def test_steps_of_generating_are_added_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys grow, and what is asked of them is the same."""
    found = []
    for many in (3, 30):
        steps = [[traced(n + 50 * layer, 1, 5 + n) for n in range(many)] for layer in range(2)]
        waiting, layers = Waiting(), [Layer("a"), Layer("b")]
        for call in zip(*steps, strict=True):
            for layer, trace in zip(layers, call, strict=True):
                layer.take(trace, 0, keep=False, waiting=waiting)
            waiting.rest()
        with Counted() as counted:
            waiting.settle()
        found.append(counted.many)
        agree(layers, added(steps, together=False))
    assert found[0] == found[1]
    for limit in ("SOME", "MOST"):
        with monkeypatch.context() as patch:
            patch.setattr(statistics, limit, 1)
            waiting, layer = Waiting(), Layer("a")
            layer.take(traced(1), 0, keep=False, waiting=waiting)
            waiting.rest()
            assert layer.shared, limit


def test_what_waits_is_there_when_it_is_asked_for() -> None:
    model, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 5, 8)
    watch = regard.watch(model)
    seen = watch.attach()
    try:
        for runs in (1, 2, 3):
            model(x, x, x, need_weights=False)
            (layer,) = seen.values()
            assert layer.statistics is not None
            assert layer.statistics.rows.tolist() == [5 * runs] * 2
            assert copy.deepcopy(layer).calls == runs
        model(x, x, x, need_weights=False)
        seen.clear()
        model(x, x, x, need_weights=False)
        (layer,) = seen.values()
        assert layer.statistics is not None
        assert layer.statistics.rows.tolist() == [5, 5]
    finally:
        watch.detach()


def test_what_is_forgotten_keeps_nothing_alive() -> None:
    model, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 5, 8)
    watch = regard.watch(model, keep="traces")
    seen = watch.attach()
    try:
        model(x, x, x, need_weights=False)
        trace = weakref.ref(next(iter(seen.values())).trace.inputs.q)
        seen.clear()
        gc.collect()
        assert trace() is None
    finally:
        watch.detach()


def test_one_reads_while_another_runs() -> None:
    waiting, layer = Waiting(), Layer("a")
    traces = [traced(n, 1, 9) for n in range(300)]
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            waiting.settle()

    reader = threading.Thread(target=read)
    reader.start()
    for trace in traces:
        layer.take(trace, 0, keep=False, waiting=waiting)
    done.set()
    reader.join()
    assert layer.statistics is not None
    assert layer.statistics.rows.tolist() == [2 * len(traces)] * 4


def test_what_waits_keeps_no_graph_alive() -> None:
    """A run under autograd that nobody differentiates: its activations go when it is over."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    held: list[weakref.ref[torch.Tensor]] = []
    first = model.layers[0]
    first.linear2.register_forward_pre_hook(lambda m, x: held.append(weakref.ref(x[0])))
    watch = regard.watch(model)
    watch.attach()
    try:
        model(torch.randn(1, 5, 8)).sum()
        gc.collect()
        assert [activation() for activation in held] == [None]
    finally:
        watch.detach()


def test_read_in_another_mode_than_it_was_seen_in() -> None:
    model, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 5, 8)
    watch = regard.watch(model)
    seen = watch.attach()
    try:
        for runs, mode in enumerate((torch.inference_mode, torch.enable_grad, torch.no_grad), 1):
            with mode():
                model(x, x, x, need_weights=False)
            (layer,) = seen.values()
            assert layer.statistics is not None
            assert layer.statistics.rows.tolist() == [5 * runs] * 2
            assert layer.entropy.isfinite().all()
    finally:
        watch.detach()
