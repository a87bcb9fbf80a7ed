"""Calls that `torch.jit.trace` records: its program holds PyTorch's operators alone, and runs them
on other numbers."""

import pytest
import torch
from torch.testing import assert_close

import regard
from regard import linear, masks, nn
from regard.errors import RegardError

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore:.torch.jit.trace.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def numbers(seed):
    return torch.randn(2, 2, 200, 8, generator=torch.Generator().manual_seed(seed))


def recorded(function, *examples):
    return torch.jit.trace(function, examples, check_trace=False)


CALLS = {
    "plain": lambda x: regard.attention(x, x, x),
    "causal": lambda x: regard.attention(x, x, x, mask=masks.causal()),
    "window": lambda x: regard.attention(x, x, x, mask=masks.window(3)),
    "half": lambda x: regard.attention(*[x.bfloat16()] * 3, mask=masks.causal()).float(),
    "grouped": lambda x: regard.attention(x, x[:, :1], x[:, :1], mask=masks.causal()),
    "softcap": lambda x: regard.attention(x, x, x, softcap=5.0),
    "out": lambda x: regard.trace(x, x, x, mask=masks.causal()).out,
    "lse": lambda x: regard.trace(x, x, x, mask=masks.causal()).lse,
    "entropy": lambda x: regard.trace(x, x, x).entropy,
    "received": lambda x: regard.trace(x, x, x, mask=masks.causal()).received(),
    "map": lambda x: regard.trace(x, x, x, mask=masks.window(9)).map(4),
    "linear": lambda x: linear.attention(x, x, x, mask=masks.causal()),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("known", [False, True], ids=["first of its kind", "of a known kind"])
def test_a_recorded_call_answers_for_other_numbers(name, known):
    call = CALLS[name]
    if known:
        call(numbers(0))
    program = recorded(call, numbers(0))
    rounding = 2e-2 if name == "half" else 1e-5
    for seed in (0, 1):
        assert_close(program(numbers(seed)), call(numbers(seed)), atol=rounding, rtol=rounding)


TABLES = {
    "padding": (masks.padding, torch.tensor([200, 150]), torch.tensor([3, 199])),
    "documents": (masks.documents, torch.arange(200) // 50, torch.arange(200) // 17),
    "keep": (masks.keep, torch.ones(1, 1, 200, 200).bool(), torch.eye(200).bool()[None, None]),
    "global tokens": (masks.global_tokens, torch.tensor([3, 40]), torch.tensor([150, 7])),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("traced", [False, True])
def test_a_recorded_call_answers_for_other_masks(name, traced):
    mask, then, now = TABLES[name]

    def call(x, table):
        how = {"mask": mask(table) & masks.causal()}
        return regard.trace(x, x, x, **how).out if traced else regard.attention(x, x, x, **how)

    program = recorded(call, numbers(0), then)
    assert_close(program(numbers(1), now), call(numbers(1), now), atol=1e-5, rtol=1e-5)


def test_what_is_masked_does_not_leak_from_a_program_that_was_recorded_without():
    program = recorded(
        lambda x, v: regard.attention(x, x, v, mask=masks.causal()), *[numbers(0)] * 2
    )
    values = numbers(1)
    values[:, :, -1] = torch.nan
    found = program(numbers(1), values)
    assert not found[:, :, :-1].isnan().any()


def test_a_recorded_module_answers_for_other_numbers():
    module = nn.MultiHeadAttention(16, 2, rotary=nn.Rotary()).eval().requires_grad_(False)
    x, other = torch.randn(2, 1, 70, 16)
    with torch.no_grad():
        program = recorded(lambda x: module(x, mask=masks.causal()), x)
        assert_close(program(other), module(other, mask=masks.causal()))


def test_a_model_is_recorded_while_it_is_watched():
    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    x, other = torch.randn(2, 1, 70, 16)
    with torch.no_grad():
        with regard.watch(layer, keep="traces") as seen:
            program = recorded(layer, x)
        assert_close(program(other), layer(other), atol=1e-5, rtol=1e-5)
    assert seen["self_attn"].trace.weights().shape == (1, 2, 70, 70)


def test_who_asks_for_tiles_is_told():
    with pytest.raises(RegardError, match=r"torch\.jit\.trace records"):
        recorded(lambda x: regard.attention(x, x, x, backend="tiled"), numbers(0))
