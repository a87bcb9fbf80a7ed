"""Attention processors, as diffusers calls them: what another one does, with regard's attention."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import regard
from regard import nn
from regard.errors import RegardError


class Own:
    """Projects as its layer says, and asks PyTorch for attention in a way of its own."""

    _attention_backend: str | None = None

    def __init__(self, **how: Any) -> None:
        self.how = how

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None
    ) -> Tensor:
        words = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k = (attn(x).unflatten(-1, (2, 8)).transpose(1, 2) for x in (hidden_states, words))
        return F.scaled_dot_product_attention(q, k, k + 1, **self.how)


def by_softmax(scores: Tensor, k: Tensor) -> Tensor:
    return scores.softmax(-1) @ (k + 1)


@pytest.mark.parametrize("case", ["plain", "causal", "keep", "added", "scaled"])
def test_attention_is_that_of_n_by_n_code(case: str) -> None:
    torch.manual_seed(0)
    attn = torch.nn.Linear(16, 16)
    x, words = torch.randn(2, 9, 16), torch.randn(2, 5, 16)
    table = torch.randn(2, 1, 9, 5)
    how: dict[str, Any] = {
        "plain": {}, "causal": {"is_causal": True}, "keep": {"attn_mask": table > -1.0},
        "added": {"attn_mask": table}, "scaled": {"scale": 0.7},
    }[case]  # fmt: skip
    traces: list[regard.Trace] = []
    out = nn.AttentionProcessor(Own(**how), see=traces.append)(attn, x, words)
    q, k = (attn(t).unflatten(-1, (2, 8)).transpose(1, 2) for t in (x, words))
    scores = q @ k.mT * (0.7 if case == "scaled" else 8**-0.5)
    if case == "causal":
        scores = scores.masked_fill(torch.ones(9, 5).triu(1).bool(), -torch.inf)
    if case == "keep":
        scores = scores.masked_fill(table <= -1.0, -torch.inf)
    if case == "added":
        scores = scores + table
    torch.testing.assert_close(out, by_softmax(scores, k), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(traces[0].weights(), scores.softmax(-1), atol=1e-6, rtol=1e-5)
    (grad,) = torch.autograd.grad(out.sum(), attn.weight)
    (expected,) = torch.autograd.grad(by_softmax(scores, k).sum(), attn.weight)
    torch.testing.assert_close(grad, expected, atol=1e-4, rtol=1e-4)


def test_it_passes_for_the_processor_that_it_holds() -> None:
    own = Own()
    ours = nn.AttentionProcessor(own)
    # diffusers hands on only arguments that it finds in the signature.
    assert list(inspect.signature(ours.__call__).parameters) == [
        "attn", "hidden_states", "encoder_hidden_states"
    ]  # fmt: skip
    ours._attention_backend = "native"
    assert own._attention_backend == "native"
    assert nn.AttentionProcessor(ours).own is own
    assert repr(ours) == "AttentionProcessor(Own)"
    assert isinstance(ours, nn.AttentionProcessor)


class Layers(torch.nn.Module):
    """What a model of diffusers offers."""

    def __init__(self, *processors: Any) -> None:
        super().__init__()
        self.attn_processors = {f"blocks.{i}.attn.processor": p for i, p in enumerate(processors)}


def test_a_model_gets_one_for_each_layer_and_is_told_the_path() -> None:
    seen: list[str] = []
    made = nn.attention_processors(Layers(Own(), Own()), lambda path, trace: seen.append(path))
    assert list(made) == ["blocks.0.attn.processor", "blocks.1.attn.processor"]
    made["blocks.1.attn.processor"](torch.nn.Identity(), torch.randn(1, 3, 16))
    assert seen == ["blocks.1.attn"]


class Layer(torch.nn.Linear):
    """A layer of diffusers."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.set_processor(Own())

    def set_processor(self, processor: Any) -> None:
        self.processor = processor

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(super().forward, x).transpose(1, 2).flatten(2)


def test_layers_are_found_in_a_model_that_does_not_list_them() -> None:
    model = torch.nn.Sequential(Layer(), torch.nn.Linear(16, 16), Layer())
    x, seen = torch.randn(1, 3, 16), []
    want = model(x)
    made = nn.attention_processors(model, lambda path, trace: seen.append(path))
    assert list(made) == ["0.processor", "2.processor"]
    for path, processor in made.items():
        model.get_submodule(path.removesuffix(".processor")).set_processor(processor)
    torch.testing.assert_close(model(x), want, atol=1e-5, rtol=1e-5)
    assert seen == ["0", "2"]


class ByHand:
    def __call__(self, attn: Any, hidden_states: Tensor) -> Tensor:
        return (hidden_states @ hidden_states.mT).softmax(-1) @ hidden_states


def test_what_cannot_be_replaced_is_said() -> None:
    with pytest.raises(RegardError, match=r"did not call PyTorch's attention[\s\S]*got: +ByHand"):
        nn.AttentionProcessor(ByHand())(None, torch.randn(1, 3, 16))
    with pytest.raises(RegardError, match=r"has weights stays where it is[\s\S]*Identity"):
        nn.AttentionProcessor(torch.nn.Identity())
    with pytest.raises(RegardError, match=r"no attention processors[\s\S]*got: +Linear"):
        nn.attention_processors(torch.nn.Linear(2, 2))


class Viewing(Own):
    """Some methods of tensors (`unflatten`) cannot be traced under a function mode; this has
    none."""

    def __call__(self, attn: Any, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        q = attn(hidden_states).view(1, -1, 2, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q + 1)


@pytest.mark.compiled
@torch.no_grad()  # PyTorch warns of its own look at gradients
@pytest.mark.parametrize(("kind", "whole"), [(Own, False), (Viewing, True)])
def test_compiled_it_gives_the_same(kind: type[Own], whole: bool) -> None:
    torch.manual_seed(0)
    attn, x = torch.nn.Linear(16, 16), torch.randn(1, 9, 16)
    ours = nn.AttentionProcessor(kind())
    compiled = torch.compile(lambda x: ours(attn, x), fullgraph=whole, backend="eager")
    torch.testing.assert_close(compiled(x), kind()(attn, x), atol=1e-6, rtol=1e-5)
