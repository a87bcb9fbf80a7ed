import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import regard
from regard import masks, nn


def by_complex_numbers(x, first, base, interleaved):
    """e^{i·n·θ} times each pair read as a complex number."""
    n, d = x.shape[-2:]
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    theta = base ** (-torch.arange(0, d, 2).double() / d)
    angle = (torch.arange(n).double() + first)[:, None] * theta
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    parts = torch.view_as_real(turned)
    return parts.flatten(-2) if interleaved else parts.transpose(-1, -2).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("first", [0, 5, 1_000_000])
def test_is_a_rotation_of_complex_numbers(first, interleaved):
    x = torch.randn(2, 3, 7, 10).double()
    ours = nn.Rotary(base=500.0, interleaved=interleaved)(x, first)
    assert_close(ours, by_complex_numbers(x, first, 500.0, interleaved))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    shift=st.integers(0, 5000),
    width=st.sampled_from([None, 2, 6]),
    interleaved=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_scores_depend_on_the_distance_alone(shift, width, interleaved, seed):
    torch.manual_seed(seed)
    rotary = nn.Rotary(width=width, interleaved=interleaved)
    q, k = torch.randn(2, 1, 1, 6, 8).double()
    here = rotary(q) @ rotary(k).mT
    there = rotary(q, shift) @ rotary(k, shift).mT
    assert_close(there, here)


def test_the_place_matters_and_the_length_does_not():
    x = torch.randn(1, 1, 4, 8)
    turned = nn.Rotary()(x)
    assert_close(turned[..., 0, :], x[..., 0, :])
    assert not torch.allclose(turned[..., 1, :], x[..., 1, :])
    assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_a_narrower_width_leaves_the_rest_alone():
    x = torch.randn(1, 2, 5, 12)
    turned = nn.Rotary(width=4)(x)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert_close(turned[..., :4], nn.Rotary()(x[..., :4]))


def test_keeps_the_type_and_stays_exact_far_out():
    x = torch.randn(1, 1, 3, 8)
    assert nn.Rotary()(x.bfloat16()).dtype == torch.bfloat16
    far = nn.Rotary()(x, 10_000_000)
    assert_close(far, nn.Rotary()(x.double(), 10_000_000).float(), atol=1e-6, rtol=1e-5)


def test_attention_with_rotary_knows_order():
    attention = nn.MultiHeadAttention(16, 2, rotary=nn.Rotary())
    x = torch.randn(1, 6, 16)
    back = torch.arange(5, -1, -1)
    assert not torch.allclose(attention(x[:, back]), attention(x)[:, back], atol=1e-3)


@pytest.mark.parametrize("width", [3, 0, 10])
def test_refuses_widths_that_cannot_be_paired(width):
    with pytest.raises(regard.RegardError) as error:
        nn.Rotary(width=width)(torch.zeros(1, 1, 2, 8))
    assert str(error.value) == (
        "rotary positions turn pairs of numbers\n"
        f"  got:      a width of {width} in heads 8 wide\n"
        "  accepted: an even width, 2 to 8\n"
        "  do:       set Rotary(width=...) to turn only a part of each head"
    )


@pytest.mark.compiled
def test_compiles_as_one_graph():
    attention = nn.MultiHeadAttention(16, 2, rotary=nn.Rotary(width=4, interleaved=True))
    x = torch.randn(1, 6, 16)
    run = torch.compile(attention, fullgraph=True, backend="eager")
    assert_close(run(x, mask=masks.causal()), attention(x, mask=masks.causal()))
