"""Nested tensors: a watched model computes what it computes unwatched, and its traces hold each
sequence as if it were alone."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard
from regard.calls import dispatch
from regard.watching.by_hand import HandWritten
from regard.watching.pytorch import attention_mode

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

LENGTHS = (3, 5, 1)
LAYOUTS = {"jagged": torch.jagged, "strided": torch.strided}


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 16, generator=generator) for n in LENGTHS]


X = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))


def nested(layout: str) -> Tensor:
    return torch.nested.nested_tensor(sequences(), layout=LAYOUTS[layout])


class Attention(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.qkv, self.layout = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), layout

    def heads(self, t: Tensor) -> Tensor:
        if self.layout == "jagged":
            return t.unflatten(-1, (2, 8)).transpose(1, 2)
        return t.reshape(len(LENGTHS), -1, 2, 8).transpose(1, 2).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(project(x)) for project in self.qkv)
        return F.scaled_dot_product_attention(q, k, v)

    def weights(self, x: Tensor) -> Tensor:
        q, k = (self.qkv[i](x).unflatten(-1, (2, 8)).transpose(0, 1) for i in (0, 1))
        return (q @ k.mT / 8**0.5).softmax(-1)


def each_alone(weights: Tensor, want: list[Tensor]) -> None:
    assert weights.shape == (len(LENGTHS), 2, max(LENGTHS), max(LENGTHS))
    for here, alone, n in zip(weights, want, LENGTHS, strict=True):
        torch.testing.assert_close(here[:, :n, :n], alone)
        assert here[:, n:].eq(0).all()
        assert here[:, :, n:].eq(0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_sequences_of_several_lengths(layout: str, grad: bool) -> None:
    torch.manual_seed(0)
    m = Attention(layout)
    with torch.set_grad_enabled(grad):
        want = m(nested(layout))
        with regard.watch(m, keep="traces") as seen:
            got = m(nested(layout))
    assert got.layout == want.layout
    for a, b in zip(got.unbind(), want.unbind(), strict=True):
        assert torch.equal(a, b)
    layer = seen[""]
    with torch.no_grad():
        each_alone(layer.trace.weights(), [m.weights(x) for x in sequences()])
    assert layer.statistics is not None
    rows, real = len(LENGTHS) * max(LENGTHS), sum(LENGTHS)
    assert layer.statistics.rows.tolist() == [rows, rows]
    assert layer.statistics.empty.tolist() == [rows - real] * 2
    if grad:
        got.unbind()[0].sum().backward()
        assert all(p.grad is not None for p in m.parameters())


def test_multihead_attention_of_nested_tensors() -> None:
    torch.manual_seed(0)
    m = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = nested("strided")
    with torch.no_grad():
        want, _ = m(x, x, x, need_weights=False)
        with regard.watch(m, keep="traces") as seen:
            got, _ = m(x, x, x, need_weights=False)
            m(x, x, x, need_weights=False)
        for a, b in zip(got.unbind(), want.unbind(), strict=True):
            assert torch.equal(a, b)
        alone = [m(t, t, t, average_attn_weights=False)[1] for t in sequences()]
        each_alone(seen[""].traces[1].weights(), alone)
        assert seen[""].calls == 2
        with regard.watch(m) as outer, regard.watch(m) as inner:
            m(x, x, x, need_weights=False)
            m(X, X, X)
    assert (outer[""].calls, inner[""].calls) == (2, 2)
    assert torch.overrides._is_torch_function_mode_enabled() is False


def test_an_encoder_of_nested_tensors() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    m = nn.TransformerEncoder(layer, 2).eval()
    x = nested("strided")
    with torch.no_grad():
        want = m(x)
        with regard.watch(m, keep="traces") as seen:
            got = m(x)
        for a, b in zip(got.unbind(), want.unbind(), strict=True):
            torch.testing.assert_close(a, b)
    assert [layer.calls for layer in seen.values()] == [1, 1]


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("two", [False, True], ids=["one watch", "two watches"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padding_that_an_encoder_makes_nested(
    left: bool, two: bool, train: bool, grad: bool
) -> None:
    """Unwatched it makes nested tensors of a batch that is padded on the right; the output is 0
    where it is."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    m = nn.TransformerEncoder(layer, 2).train(train)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    padding = padding.flip(1) if left else padding
    with torch.set_grad_enabled(grad):
        want = m(X, src_key_padding_mask=padding)
        with regard.watch(m, keep="traces") as seen, contextlib.ExitStack() as stack:
            if two:
                other = stack.enter_context(regard.watch(m.layers[1]))
            torch.testing.assert_close(m(X, src_key_padding_mask=padding), want)
    nested = not (left or train or grad)
    assert want[padding].eq(0).all() == nested
    assert [layer.calls for layer in seen.values()] == [1, 1]
    if two:
        assert other["self_attn"].calls == 1
    weights = seen["layers.0.self_attn"].trace.weights()
    assert weights[1, :, :, padding[1]].eq(0).all()
    assert torch._C._is_torch_function_enabled()


@pytest.mark.compiled
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_compiled_encoder(how: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.inner = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
            return self.inner(x, src_key_padding_mask=src_key_padding_mask)

    # The compiler remembers functions that it gave up, such as loops over modules with hooks.
    torch.compiler.reset()
    torch.manual_seed(0)
    m = Outer().eval()
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    run = torch.compile(m, backend="aot_eager") if how == "wrapped" else m
    if how == "in place":
        m.compile(backend="aot_eager")
    with torch.no_grad():
        want = run(X, src_key_padding_mask=padding)
        with regard.watch(run) as seen:
            got = run(X, src_key_padding_mask=padding)
    # Older versions of PyTorch make nested tensors there too, newer ones do not.
    torch.testing.assert_close(got, want)
    assert [layer.calls for layer in seen.values()] == [1, 1]


def test_what_pytorch_refuses_is_refused_as_before() -> None:
    m = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    for layout in LAYOUTS:
        x = nested(layout)
        with pytest.raises(AssertionError, match="does not support NestedTensor outside") as plain:
            m(x, x, x)
        with pytest.raises(AssertionError) as watched, regard.watch(m):
            m(x, x, x)
        assert str(watched.value) == str(plain.value)
    assert torch.overrides._is_torch_function_mode_enabled() is False


def test_calls_that_cannot_be_padded_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch takes such calls on a card only; here its answer is a stand-in."""
    left: list[str] = []
    by_hand = HandWritten(nn.Identity(), str, bool, set())
    mode = attention_mode.AttentionMode(str, lambda _: True, by_hand, left.append)
    q, k = (
        torch.nested.nested_tensor([torch.randn(2, n, 8) for n in lengths])
        for lengths in ((2, 3), (4, 3))
    )
    monkeypatch.setattr(attention_mode, "_pytorch", lambda query, *_, **__: query)
    monkeypatch.setattr(attention_mode, "watched", lambda: True)
    monkeypatch.setattr(dispatch, "trace", lambda *_, **__: pytest.fail("it was traced"))
    assert mode.attend(q, k, k, is_causal=True) is q
    assert len(left) == 1
    assert left[0].startswith("nested tensors of other lengths")
