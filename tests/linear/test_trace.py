"""Every question about implied weights, against the n×n matrix in float64."""

import pytest
import torch
from torch.testing import assert_close

import regard
from regard import linear, masks
from regard.backends.reference import Reference
from tests.linear.naive import draw, mix, shares

SEEN = {"causal": True, "lengths": torch.tensor([150, 90])}
MASK = masks.causal() & masks.padding(SEEN["lengths"])


@pytest.mark.parametrize(
    "features",
    [linear.elu_plus_one, torch.relu, linear.random_features(5, 6)],
    ids=["elu", "relu", "random"],
)
def test_every_question_is_exact(features):
    q, k, v = draw(150)
    t = linear.trace(q, k, v, features=features, mask=MASK)
    p = shares(q, k, features, **SEEN)
    assert_close(t.out, mix(p, v))
    assert_close(t.out, linear.attention(q, k, v, features=features, mask=MASK))
    assert_close(t.weights(), p)
    assert_close(t.weights([3, 149], range(0, 150, 7), [2]), p[:, [2]][:, :, [3, 149], ::7])
    assert_close(t.received(), p.sum(-2))
    assert_close(t.entropy, -torch.special.xlogy(p, p).sum(-1))
    assert_close(t.mass([0, 5]), p[..., [0, 5]].sum(-1))
    assert_close(t.top(4).values, p.topk(4).values)
    assert_close(t.map(3, pool="sum")[..., 1, 0], p[..., 50:100, :50].sum((-1, -2)))
    assert_close(t.map(5, pool="max")[..., 4, 0], p[..., 120:, :30].amax((-1, -2)))
    ratio = t.logits([100], [3, 4]).diff()
    assert_close(ratio, p[..., [100], 3:5].log().diff())


@pytest.mark.parametrize("features", [linear.elu_plus_one, torch.relu])
def test_is_what_the_reference_makes_of_the_features(features):
    t = linear.trace(*draw(40), features=features, mask=masks.causal())
    rows = Reference().observe(t.inputs)
    for ours, right in zip((t.out, t.lse, t.max_logit, t.entropy), rows, strict=True):
        assert_close(ours, right)


def test_questions_learn():
    q, k, v = draw(20, width=3)
    t, p = (
        linear.trace(q, k, v, mask=masks.causal()),
        shares(q, k, linear.elu_plus_one, causal=True),
    )
    weight = torch.randn(20, dtype=torch.float64)
    asked = [
        (t.received(), p.sum(-2)),
        (t.entropy, -(p * torch.where(p > 0, p, 1.0).log()).sum(-1)),
        (t.weights()[..., 3], p[..., 3]),
        (t.mass(2), p[..., 2]),
    ]
    for ours, right in asked:
        grads = [
            torch.autograd.grad((x * weight).sum(), (q, k), retain_graph=True)
            for x in (ours, right)
        ]
        assert_close(*grads)


@pytest.mark.parametrize("features", [linear.elu_plus_one, torch.relu], ids=["elu", "relu"])
def test_pairs_without_weight_give_no_gradient(features):
    q, k, v = draw(9, width=2)
    seen = {"causal": True, "lengths": torch.tensor([5, 9])}
    t = linear.trace(q, k, v, features=features, mask=masks.causal() & masks.padding([5, 9]))
    p = shares(q, k, features, **seen)
    assert bool((p.sum(-1) == 0).any()) == (features is torch.relu)
    logits = torch.where(p > 0, t.logits(), 0.0) - torch.where(p > 0, t.lse[..., None], 0.0)
    shown = torch.where(p > 0, torch.where(p > 0, p, 1.0).log(), 0.0)
    for found, right in (
        (t.weights(), p), (t.mass([0, 7]), p[..., [0, 7]].sum(-1)), (t.received(), p.sum(-2)),
        (logits, shown),
    ):  # fmt: skip
        pull = torch.randn(right.shape, dtype=right.dtype)
        ours, theirs = (
            torch.autograd.grad((x * pull).sum(), (q, k), retain_graph=True) for x in (found, right)
        )
        assert_close(ours, theirs)


def test_a_row_that_meets_nothing_is_empty():
    q, k, v = -torch.ones(1, 1, 3, 2), *torch.ones(2, 1, 1, 3, 2)
    q[:, :, 1] = 1.0
    t = linear.trace(q, k, v, features=torch.relu)
    assert t.lse[0, 0, 0] == -torch.inf
    assert_close(
        t.entropy,
        torch.tensor([[[0.0, 3.0, 0.0]]]).log1p()
        * torch.tensor([0, 1, 0])
        * (torch.tensor(3.0).log() / torch.tensor(4.0).log()),
    )
    assert_close(t.received(), torch.full((1, 1, 3), 1 / 3))
    assert (t.weights([0, 2]) == 0).all()
    assert (t.top(2).indices[0, 0, 0] == -1).all()


def test_the_axes_and_the_file_of_a_trace(tmp_path):
    q, k, v = (t[0, 0] for t in draw(7, learns=False))
    t = linear.trace(q, k, v)
    assert t.weights().shape == (7, 7)
    t.save(tmp_path / "one.regard")
    with regard.load(tmp_path / "one.regard") as file:
        assert_close(file.trace.weights(), t.weights())
    heads = linear.trace(*draw(7, learns=False))
    assert_close(heads[1, [3]].weights(), heads.weights()[1:, 3:])


def test_features_below_zero_are_refused():
    with pytest.raises(regard.RegardError, match="negative weights"):
        linear.trace(*draw(4), features=torch.tanh)
