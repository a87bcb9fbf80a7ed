import pytest
import torch
from torch.testing import assert_close

import regard
from regard import masks, nn


def test_plain_is_the_formula_and_has_no_parameters():
    attention = nn.DotAttention(6)
    q, k, v = (torch.randn(2, n, d).double() for n, d in ((3, 6), (7, 6), (7, 9)))
    assert not list(attention.parameters())
    assert_close(attention(q, k, v), (q @ k.mT).softmax(-1) @ v)
    assert_close(attention(q), (q @ q.mT).softmax(-1) @ q)


def test_general_is_the_formula():
    attention = nn.DotAttention(6, key_width=5, general=True).double()
    q, k = torch.randn(2, 3, 6).double(), torch.randn(2, 7, 5).double()
    weights = (q @ attention.W @ k.mT).softmax(-1)
    y, seen = attention(q, k, trace=True)
    assert_close(y, weights @ k)
    assert_close(seen.weights(), weights)


def test_general_with_the_identity_is_plain():
    attention = nn.DotAttention(6, general=True)
    torch.nn.init.eye_(attention.W)
    x = torch.randn(1, 5, 6)
    plain = nn.DotAttention(6)(x, mask=masks.causal())
    assert_close(attention(x, mask=masks.causal()), plain)


def test_learns():
    attention = nn.DotAttention(6, general=True)
    attention(torch.randn(1, 5, 6)).square().sum().backward()
    assert attention.W.grad.abs().sum() > 0


def test_refuses_different_widths_without_a_matrix():
    with pytest.raises(regard.RegardError) as error:
        nn.DotAttention(6, key_width=5)
    assert str(error.value) == (
        "a dot product needs queries and keys of one width\n"
        "  got:      d_model=6, key_width=5\n"
        "  accepted: the same width\n"
        "  do:       pass general=True to learn a matrix between them"
    )


@pytest.mark.compiled
@pytest.mark.parametrize("general", [False, True])
def test_compiles_as_one_graph(general):
    attention = nn.DotAttention(6, general=general)
    x = torch.randn(2, 3, 6)
    run = torch.compile(attention, fullgraph=True, backend="eager")
    assert_close(run(x, mask=masks.causal()), attention(x, mask=masks.causal()))
