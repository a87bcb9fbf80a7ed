"""Gated attention and the delta rule, against a recurrence over tokens in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import regard
from regard import linear, masks
from tests.linear.naive import draw, mix, recurrence

IDS = torch.tensor([[0] * 30 + [1] * 3 + [2] * 20, [5] * 53])
RULES = ["head", "channel", "delta", "gated delta"]


def numbers(rule, n, seed=1):
    """log_decay and beta."""
    source = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=source, dtype=torch.float64)

    decay = None if rule == "delta" else -3 * rand(2, 2, n, *([5] if rule == "channel" else []))
    beta = rand(2, 2, n) if "delta" in rule else None
    return [None if t is None else t.requires_grad_() for t in (decay, beta)]


def call(q, k, v, decay, beta, *, trace=False, **how):
    if beta is None:
        return (linear.gated_trace if trace else linear.gated)(q, k, v, decay, **how)
    return (linear.delta_trace if trace else linear.delta)(q, k, v, beta, decay, **how)


def inputs(n, learns=True):
    q, k, v = draw(n, learns=False)
    k = torch.nn.functional.normalize(k, dim=-1)
    return [t.requires_grad_(learns) for t in (q, k, v)]


@pytest.mark.compiled
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mask", [None, masks.padding([7, 12])], ids=["plain", "padding"])
def test_compiles_as_one_graph(rule, mask):
    def run(q, k, v):
        return call(q, k, v, *more, mask=mask)

    qkv, more = inputs(12), numbers(rule, 12)
    graph = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_close(graph(*qkv), run(*qkv))
    wanted, found = (torch.autograd.grad(f(*qkv).square().sum(), qkv) for f in (run, graph))
    assert_close(found, wanted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", ["plain", "padding", "documents"])
def test_is_the_recurrence_forward_and_backward(rule, case, monkeypatch):
    monkeypatch.setattr("regard.linear.scan.SEGMENT", 16)
    qkv, more = inputs(53), numbers(rule, 53)
    lengths = torch.tensor([40, 0]) if case == "padding" else None
    ids = IDS if case == "documents" else None
    mask = None if lengths is None else masks.causal() & masks.padding(lengths)
    mask = mask if ids is None else masks.documents(ids)
    p = recurrence(*qkv, *more, lengths=lengths, ids=ids)
    right = mix(p, qkv[2])
    out = call(*qkv, *more, mask=mask, chunk=8)
    assert_close(out, right)
    learned = [t for t in (*qkv, *more) if t is not None]
    pull = torch.randn(right.shape, dtype=torch.float64)
    assert_close(
        *(torch.autograd.grad((x * pull).sum(), learned, retain_graph=True) for x in (out, right))
    )
    t = call(*qkv, *more, mask=mask, chunk=8, trace=True)
    assert_close(t.out, right)
    assert_close(t.weights(), p)
    assert_close(t.weights([51, 3, 17], range(0, 50, 7), [2]), p[:, [2]][:, :, [51, 3, 17], :50:7])
    assert_close(t.received(), p.sum(-2))
    assert_close(t.mass([0, 9]), p[..., [0, 9]].sum(-1))
    assert_close(t.mass([9, 0, 9]), p[..., [0, 9]].sum(-1))
    assert_close(t.top(3).values.abs(), p.abs().topk(3).values)
    picked = p.gather(-1, t.top(3).indices.clamp_min(0))
    assert_close(t.top(3).values, picked * (t.top(3).indices >= 0))
    region = p[..., 10:50, 5:45]
    assert_close(t.map(4, (10, 50), (5, 45))[..., 3, 1], region[..., 30:, 10:20].mean((-1, -2)))
    assert_close(
        t.map(4, (10, 50), (5, 45), "max"),
        region.unflatten(-1, (4, 10)).unflatten(-3, (4, 10)).amax((-1, -3)),
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(parts=st.lists(st.integers(0, 9), min_size=1, max_size=4), rule=st.sampled_from(RULES))
def test_a_state_carried_on_is_the_state_of_the_whole(parts, rule):
    n = sum(parts)
    qkv, more = inputs(n, learns=False), [t if t is None else t.detach() for t in numbers(rule, n)]
    whole, state, steps, at = linear.State(), linear.State(), [], 0
    right = call(*qkv, *more, state=whole, chunk=4)
    for size in parts:
        piece = [None if t is None else t[:, :, at : at + size] for t in (*qkv, *more)]
        steps.append(call(*piece, state=state, chunk=4))
        at += size
    assert_close(torch.cat(steps, 2), right)
    assert_close(state.sums, whole.sums)


@pytest.mark.parametrize("rule", ["head", "delta", "attention"])
@pytest.mark.parametrize("types", [("float32", "float64"), ("float64", "float32")], ids=str)
def test_a_state_goes_on_in_the_precision_of_the_call(rule, types):
    qkv, more = (
        inputs(12, learns=False),
        [t if t is None else t.detach() for t in numbers(rule, 12)],
    )
    state, steps = linear.State(), []
    features = linear.random_features(5, 7)

    def run(x, state=None):
        if rule == "attention":
            return linear.attention(*x[:3], mask=masks.causal(), features=features, state=state)
        return call(*x, state=state)

    for part, name in zip((slice(5), slice(5, 12)), types, strict=True):
        x = [None if t is None else t[:, :, part].to(getattr(torch, name)) for t in (*qkv, *more)]
        steps.append(run(x, state))
        assert steps[-1].dtype == state.sums.dtype == getattr(torch, name)
    assert_close(
        torch.cat([t.double() for t in steps], 2), run([*qkv, *more]), atol=1e-5, rtol=1e-4
    )


def test_strong_decays_and_half_precision_stay_exact():
    q, k, v = inputs(200, learns=False)
    decay = torch.where(torch.arange(200) % 7 == 3, -torch.inf, -1e-3).expand(2, 2, 200).double()
    right = mix(recurrence(q, k, v, decay), v)
    assert_close(linear.gated(q, k, v, decay), right)
    wide = decay[..., None].expand(2, 2, 200, 5)
    low = linear.gated(*(t.bfloat16() for t in (q, k, v)), wide.bfloat16())
    assert low.dtype == torch.bfloat16
    assert_close(low.double(), right, atol=0.05, rtol=0.05)


def test_padding_hides_what_is_not_a_number():
    q, k, v = inputs(20, learns=False)
    decay, beta = numbers("gated delta", 20)
    mask = masks.padding([20, 12])
    right = linear.delta(q, k, v, beta, decay, mask=mask)
    k, v, decay, beta = (t.detach().clone() for t in (k, v, decay, beta))
    for t in (k, v, beta):
        t[1, :, 12:] = torch.nan
    assert_close(linear.delta(q, k, v, beta, decay, mask=mask), right)


@pytest.mark.parametrize("rule", RULES)
def test_questions_under_autocast_are_those_without(rule):
    x = [t.detach().float() for t in inputs(40)]
    t = call(*x, *(t if t is None else t.float() for t in numbers(rule, 40)), trace=True, chunk=16)

    def asked():
        tops, maps = t.top(3), [t.map(4, pool=pool) for pool in ("mean", "max")]
        return [t.weights(), t.received(), t.mass([0, 20]), *tops, *maps]

    right = asked()
    with torch.autocast("cpu", torch.bfloat16):
        found = asked()
    assert_close(found, right, atol=0, rtol=0)


def test_says_what_a_weight_is_not():
    t = linear.gated_trace(*inputs(4), numbers("head", 4)[0])
    with pytest.raises(regard.RegardError, match="entropy needs weights that sum to 1"):
        t.entropy  # noqa: B018
    q, k, v = inputs(4)
    with pytest.raises(regard.RegardError, match="a factor of at most 1"):
        linear.gated(q, k, v, torch.ones(2, 2, 4))
    with pytest.raises(regard.RegardError, match="takes one decay for all channels"):
        linear.delta(q, k, v, torch.ones(2, 2, 4), -torch.ones(2, 2, 4, 5))
    with pytest.raises(regard.RegardError, match="beta has a number for each key head"):
        linear.delta(q, k, v, torch.ones(2, 4, 4))


@pytest.mark.parametrize("rule", ["head", "delta"])
def test_no_queries_have_no_weights(rule):
    t = call(*inputs(9), *numbers(rule, 9), trace=True, chunk=4)
    assert t.weights(queries=[], keys=[1, 2], heads=[0]).shape == (2, 1, 0, 2)


def test_numbers_of_other_kinds_are_refused(monkeypatch):
    # Wrong types reach regard's own checks even when the shape-checking hook is on.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    q, k, v = inputs(4)
    fades = -torch.ones(2, 2, 4)
    with pytest.raises(regard.RegardError, match=r"(?s)log_decay has a number.*-0\.5"):
        linear.gated(q, k, v, -0.5)
    with pytest.raises(regard.RegardError, match="beta has a number"):
        linear.delta(q, k, v, 0.5)
    with pytest.raises(regard.RegardError, match="scale must be finite"):
        linear.gated(q, k, v, fades, scale=float("nan"))
    with pytest.raises(regard.RegardError, match="scale is a number"):
        linear.gated(q, k, v, fades, scale="0.5")


@pytest.mark.parametrize("rule", ["head", "delta"])
def test_kernels_are_asked_for_wherever_they_may_run(rule, monkeypatch):
    asked = []

    def takes(backend, *_):
        asked.append(backend)
        return False

    monkeypatch.setattr("regard.linear.recurrence.takes_kernels", takes)
    q, k, v = (t.double() for t in torch.randn(3, 2, 2, 70, 5))
    for backend in (None, "tiled"):
        call(q, k, v, *numbers(rule, 70), backend=backend)
    assert asked == [None, "tiled"]
