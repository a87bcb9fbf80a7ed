"""Linear attention against the n×n formula in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import regard
from regard import linear, masks
from tests.linear.naive import draw, mix, shares

RANDOM = linear.random_features(5, 7, seed=2)
MAPS = [linear.elu_plus_one, torch.relu, RANDOM, lambda x: x.square()]
IDS = torch.tensor([[0] * 40 + [1] * 3 + [2] * 48, [5] * 91])
CASES = {
    "all": {},
    "causal": {"causal": True},
    "padding": {"causal": True, "lengths": torch.tensor([70, 0])},
    "documents": {"causal": True, "ids": IDS},
    "both ways": {"ids": IDS, "lengths": torch.tensor([91, 37])},
    "window": {"causal": True, "window": (37, 5)},
    "window both ways": {"window": (20, 49)},
    "window in documents": {
        "causal": True,
        "ids": IDS,
        "window": (34, 0),
        "lengths": torch.tensor([80, 91]),
    },
}


def mask_of(causal=False, lengths=None, ids=None, window=None):
    parts = [masks.causal()] if causal else []
    parts += [] if lengths is None else [masks.padding(lengths)]
    parts += [] if ids is None else [masks.documents(ids)]
    parts += [] if window is None else [masks.window(*window)]
    whole = parts[0] if parts else None
    for part in parts[1:]:
        whole = whole & part
    return whole


@pytest.mark.parametrize("features", MAPS, ids=["elu", "relu", "random", "own"])
@pytest.mark.parametrize("case", CASES)
def test_is_the_formula_forward_and_backward(case, features, monkeypatch):
    monkeypatch.setattr("regard.linear.scan.SEGMENT", 32)
    inputs, seen = draw(91), CASES[case]
    ours = linear.attention(*inputs, features=features, mask=mask_of(**seen), chunk=16)
    right = mix(shares(*inputs[:2], features, **seen), inputs[2])
    assert_close(ours, right)
    pull = torch.randn(right.shape, dtype=torch.float64)
    grads = [torch.autograd.grad((out * pull).sum(), inputs) for out in (ours, right)]
    assert_close(*grads)


def test_other_lengths_axes_and_precisions():
    q, k, v = draw(6, 11, learns=False)
    right = mix(shares(q, k, linear.elu_plus_one), v)
    assert_close(linear.attention(q, k, v), right)
    low = linear.attention(*(t.bfloat16() for t in (q, k, v)))
    assert low.dtype == torch.bfloat16
    assert_close(low.double(), right, atol=2e-2, rtol=2e-2)
    single = linear.attention(q[0, 0], k[0, 0], v[0, 0])
    assert_close(single, right[0, 0])
    assert_close(linear.attention(q[None], k[None], v[None])[0], right)
    none = draw(0, learns=False)
    assert linear.attention(*none, mask=masks.causal() & masks.documents([])).shape == (2, 4, 0, 3)
    assert (linear.attention(q, k[:, :, :0], v[:, :, :0]) == 0).all()


def test_half_precision_sums_in_float32():
    q, k, v = (t.bfloat16() for t in draw(3000, learns=False))
    out = linear.attention(q, k, v, mask=masks.causal())
    right = linear.attention(*(t.double() for t in (q, k, v)), mask=masks.causal())
    assert_close(out, right.bfloat16(), atol=1e-3, rtol=2e-2)


@pytest.mark.parametrize("features", [linear.elu_plus_one, RANDOM])
def test_padding_hides_what_is_not_a_number(features):
    q, k, v = draw(20, learns=False)
    mask = masks.causal() & masks.padding([20, 12])
    right = linear.attention(q, k, v, features=features, mask=mask)
    k[1, :, 12:], v[1, :, 12:] = torch.nan, torch.inf
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = linear.attention(*inputs, features=features, mask=mask)
    assert_close(out, right)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


def test_large_keys_do_not_overflow_random_features():
    q, k, v = draw(50, learns=False)
    features = linear.random_features(5, 64)
    out = linear.attention(20 * q, 20 * k, v, features=features, mask=masks.causal())
    assert out.isfinite().all()
    assert (out != 0).any(-1).all()


def test_second_derivatives_forward_mode_and_samples():
    q, k, v = draw(9, heads=(1, 1), width=2, value=2)

    def run(q, k, v):
        return linear.attention(q, k, v, mask=masks.causal(), chunk=2)

    def plain(q, k, v):
        return mix(shares(q, k, linear.elu_plus_one, causal=True), v)

    seconds = []
    for function in (run, plain):
        (g,) = torch.autograd.grad(function(q, k, v).square().sum(), q, create_graph=True)
        seconds.append(torch.autograd.grad(g.square().sum(), (q, k, v)))
    assert_close(*seconds)
    assert_close(*(torch.func.jvp(f, (q, k, v), (k, q, v))[1] for f in (run, plain)))
    each = torch.func.vmap(torch.func.grad(lambda *t: run(*(x[None] for x in t)).sum()))(q, k, v)
    assert_close(each, torch.autograd.grad(plain(q, k, v).sum(), q)[0])
    pulls = torch.randn(3, *run(q, k, v).shape, dtype=torch.float64)
    many = [
        torch.autograd.grad(f(q, k, v), q, pulls, is_grads_batched=True)[0] for f in (run, plain)
    ]
    assert_close(*many)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    parts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    chunk=st.integers(1, 7),
    random=st.booleans(),
    documents=st.booleans(),
)
def test_a_state_carried_on_is_the_state_of_the_whole(parts, chunk, random, documents):
    n = sum(parts)
    q, k, v = draw(n, learns=False)
    features = RANDOM if random else linear.elu_plus_one
    ids = torch.arange(n) // 4

    def mask(part):
        return masks.causal() & masks.documents(ids[part]) if documents else masks.causal()

    whole, steps, state, at = linear.State(), [], linear.State(), 0
    how = {"features": features, "chunk": chunk}
    right = linear.attention(q, k, v, mask=mask(slice(0, n)), state=whole, **how)
    for size in parts:
        part = slice(at, at + size)
        steps.append(
            linear.attention(
                *(t[:, :, part] for t in (q, k, v)), mask=mask(part), state=state, **how
            )
        )
        at += size
    assert_close(torch.cat(steps, 2), right)
    assert state.tokens == whole.tokens == n
    scale = 1.0 if state.shift is None else (state.shift - whole.shift).exp()
    assert_close(state.sums * scale, whole.sums)


def test_gradients_flow_through_a_state():
    inputs = draw(10)
    right = mix(shares(*inputs[:2], linear.elu_plus_one, causal=True), inputs[2])
    state, steps = linear.State(), []
    for part in (slice(0, 4), slice(4, 10)):
        pieces = [t[:, :, part] for t in inputs]
        steps.append(linear.attention(*pieces, mask=masks.causal(), state=state, chunk=3))
    pull = torch.randn(right.shape, dtype=torch.float64)
    grads = [
        torch.autograd.grad((out * pull).sum(), inputs) for out in (torch.cat(steps, 2), right)
    ]
    assert_close(*grads)
    assert state.sums.requires_grad
    assert not state.detach().sums.requires_grad


def test_random_features_approach_softmax():
    q, k, v = draw(64, width=16, heads=(8, 8), learns=False)
    q, k = q / 2, k / 2
    softmax = regard.attention(q, k, v)

    def error(count):
        found = [
            linear.attention(q, k, v, features=linear.random_features(16, count, seed=s)) - softmax
            for s in range(4)
        ]
        return float(torch.stack(found).square().mean().sqrt() / softmax.square().mean().sqrt())

    few, many = error(16), error(1024)
    assert many < few / 4
    assert many < 0.1


def test_random_features_are_orthogonal_and_seeded():
    a, b = linear.random_features(8, 20), linear.random_features(8, 20)
    assert a == b
    assert a != linear.random_features(8, 20, seed=1)
    first = torch.nn.functional.normalize(a.projection[:8].double(), dim=-1)
    assert_close(first @ first.mT, torch.eye(8).double(), atol=1e-6, rtol=0)
    with pytest.raises(regard.RegardError, match="drawn for one width"):
        linear.attention(*draw(4), features=a)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (masks.window(3, offset=1), "windows over one sequence only"),
        (masks.prefix(2), "cannot leave out these pairs"),
        (masks.causal(offset=1), "causal over one sequence only"),
        (masks.documents([0, 1, 0, 0, 0]), "documents one after the other"),
    ],
)
def test_refuses_what_a_sum_cannot_leave_out(mask, text):
    with pytest.raises(regard.RegardError, match=text):
        linear.attention(*draw(5), mask=mask)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 40),
    chunk=st.integers(1, 7),
    sides=st.tuples(st.integers(0, 45), st.integers(0, 45)),
    documents=st.integers(0, 30),
)
def test_a_window_of_any_width_is_the_formula(n, chunk, sides, documents):
    q, k, v = draw(n, learns=False)
    ids = torch.arange(n) // documents if documents else None
    how = {"ids": ids, "window": sides}
    out = linear.attention(q, k, v, mask=mask_of(**how), chunk=chunk)
    assert_close(out, mix(shares(q, k, linear.elu_plus_one, **how), v))


def test_a_window_loses_no_digits_to_keys_that_left_it():
    q, k, v = (t.float() for t in draw(200, learns=False))
    k[:, :, :100] *= 1e8
    right = mix(shares(q.double(), k.double(), linear.elu_plus_one, window=(20, 0)), v.double())
    out = linear.attention(q, k, v, mask=masks.window(20), chunk=4)
    assert_close(out[:, :, 121:].double(), right[:, :, 121:], atol=1e-5, rtol=1e-5)


def test_a_trace_of_a_window_is_asked_like_others():
    q, k, v = draw(50, learns=False)
    right = shares(q, k, linear.elu_plus_one, window=(9, 0))
    t = linear.trace(q, k, v, mask=masks.window(9), chunk=4)
    assert_close(t.weights(), right)
    assert_close(t.out, mix(right, v))
    assert_close(t.received(), right.sum(2))


def test_a_window_of_what_is_one_sum_is_refused():
    inputs, seen = draw(5), masks.causal() & masks.window(3)
    with pytest.raises(regard.RegardError, match=r"cannot drop single ones\n.*window\(3\)"):
        linear.attention(*inputs, mask=seen, state=linear.State())
    with pytest.raises(regard.RegardError, match=r"(?s)cannot drop single ones.*log_decay"):
        linear.gated(*inputs, torch.zeros(2, 2, 5), mask=seen)


def test_refuses_the_state_of_another_layer():
    state = linear.State()
    linear.attention(*draw(3), state=state)
    with pytest.raises(regard.RegardError, match="this state is of another call"):
        linear.attention(*draw(3, width=6), state=state)


@pytest.mark.compiled
def test_compiles_as_one_graph():
    def run(q, k, v):
        return linear.attention(q, k, v, mask=masks.causal(), features=RANDOM, chunk=4)

    inputs = [t.detach().float().requires_grad_() for t in draw(11)]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*inputs), run(*inputs))
    compiled(*inputs).sum().backward()
