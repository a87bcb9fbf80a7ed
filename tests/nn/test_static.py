import pytest
import torch
from torch.testing import assert_close

import regard
from regard import masks, nn

BUY, APPLE, PHONE = 0, 1, 2
WORDS = torch.tensor([[1.0, 1.0], [2.0, 2.0], [0.0, 4.0]])


def raw_scores(seen):
    """Logits back from the weights: log p + lse."""
    return seen.weights().log() + seen.lse[..., None]


def test_apple_against_buy_apple_and_phone():
    y, seen = nn.StaticAttention()(WORDS[None], trace=True)
    assert_close(raw_scores(seen)[0, APPLE], torch.tensor([4.0, 8.0, 8.0]), atol=1e-5, rtol=1e-5)
    weights = torch.tensor([4.0, 8.0, 8.0]).softmax(-1)
    assert_close(seen.weights(queries=APPLE)[0, 0], weights)
    assert_close(y[0, APPLE], weights @ WORDS)


def test_apple_leans_to_phone_in_its_context():
    """In the company of Phone, Apple moves towards it; the fruit's two numbers were equal."""
    y = nn.StaticAttention()(WORDS[None])
    assert y[0, APPLE, 1] > y[0, APPLE, 0]


def test_scores_without_projections_are_symmetric_and_with_them_not():
    _, seen = nn.StaticAttention()(WORDS[None], trace=True)
    scores = raw_scores(seen)[0]
    assert_close(scores, scores.mT, atol=1e-5, rtol=1e-5)
    weights = seen.weights()[0]
    assert not torch.allclose(weights, weights.mT)

    projected = nn.MultiHeadAttention(2, 1)
    _, seen = projected(WORDS[None], trace=True)
    scores = raw_scores(seen)[0, 0]
    assert not torch.allclose(scores, scores.mT, atol=1e-2)


def test_is_the_formula():
    x = torch.randn(2, 9, 4).double()
    assert_close(nn.StaticAttention(0.5)(x), (0.5 * x @ x.mT).softmax(-1) @ x)
    first = nn.StaticAttention()(x, mask=masks.causal())[:, 0]
    assert_close(first, x[:, 0])


def test_has_no_parameters():
    assert not list(nn.StaticAttention().parameters())


def test_refuses_a_scale_that_is_no_number():
    with pytest.raises(regard.RegardError, match="scale must be finite"):
        nn.StaticAttention(float("nan"))(WORDS[None])


@pytest.mark.compiled
def test_compiles_as_one_graph():
    attention = nn.StaticAttention()
    run = torch.compile(attention, fullgraph=True, backend="eager")
    assert_close(run(WORDS[None]), attention(WORDS[None]))
