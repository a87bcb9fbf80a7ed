"""Which models are asked about function by function, and that nothing goes unseen in the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard
from regard.watching import reach, watcher

transformers = pytest.importorskip("transformers")

from torch.overrides import _get_current_function_mode_stack  # noqa: E402

from regard.watching import huggingface  # noqa: E402
from tests.watching.huggingface.test_huggingface import FAMILIES, build, inputs, tokens  # noqa: E402
from tests.watching.left_behind import nothing_in  # noqa: E402

ASKED = {"siglip"}
"""Families with a part that calls nn.MultiheadAttention."""


def _modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills with a word for each run in which PyTorch asks about every function."""
    entered: list[str] = []
    real = watcher.AttentionMode.__enter__

    def enter(mode: Any) -> Any:
        entered.append("on")
        return real(mode)

    monkeypatch.setattr(watcher.AttentionMode, "__enter__", enter)
    return entered


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_use_the_interface_are_not_slowed_function_by_function(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, model = _modes(monkeypatch), build(family)
    with torch.no_grad(), regard.watch(model) as seen:
        model(**inputs(model, family))
    assert len(seen) >= 1
    assert entered == (["on"] if family in ASKED else [])


class Mine(nn.Module):
    """Attends by PyTorch's function, before what it holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        y = x.float()[:, None, :, None].expand(-1, 1, -1, 8)
        return self.inner(x), F.scaled_dot_product_attention(y, y, y)


def _hook(module: nn.Module, args: Any, output: Tensor) -> None:
    F.scaled_dot_product_attention(output, output, output)


def test_attention_of_others_around_and_in_such_models_is_seen() -> None:
    ids, path = tokens(), "model.layers.1.self_attn"
    model = build("llama", "sdpa")
    with torch.no_grad():
        wrapped = Mine(model)
        with regard.watch(wrapped) as seen:
            wrapped(ids)
        assert list(seen) == ["inner.model.layers.0.self_attn", f"inner.{path}", ""]
        with model.model.norm.register_forward_hook(_hook), regard.watch(model) as seen:
            model(ids)
        assert len(seen) == 3
        with regard.watch(model) as seen, model.model.norm.register_forward_hook(_hook):
            model(ids)
        assert len(seen) == 3
        attention = model.get_submodule(path)
        own = attention.forward
        attention.forward = lambda hidden_states, **_: (
            F.scaled_dot_product_attention(*3 * [hidden_states[:, None]])[:, 0],
            None,
        )
        with regard.watch(model) as seen:
            model(ids)
        attention.forward = own
        assert seen[path].heads == 1


@pytest.mark.parametrize("fails", [False, True])
def test_inside_of_somebodys_model_theirs_are_not_slowed(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: list[int] = []
    real = huggingface.make_mask

    def spy(*args: Any, **how: Any) -> Any:
        stacks.append(len(_get_current_function_mode_stack()))
        if fails:
            raise KeyError("mine")
        return real(*args, **how)

    class Forgiving(Mine):
        def forward(self, x: Tensor) -> Any:
            try:
                return super().forward(x)
            except KeyError:
                stacks.append(len(_get_current_function_mode_stack()))
                y = x.float()[:, None, :, None]
                return F.scaled_dot_product_attention(y, y, y)

    monkeypatch.setattr(huggingface.interface, "make_mask", spy)
    model = Forgiving(build("llama", "sdpa"))
    watches = [regard.watch(model), regard.watch(model)]
    seen = [watch.attach() for watch in watches]
    with torch.no_grad():
        model(tokens())
    for watch in watches:
        watch.detach()
    assert stacks == ([0, 2] if fails else [0])
    assert [list(s)[-1] for s in seen] == ["", ""]
    assert [len(s) for s in seen] == ([1, 1] if fails else [3, 3])
    nothing_in(model)


def test_a_module_of_theirs_alone_is_seen() -> None:
    """Without a model around it nobody switches its config."""
    attention = build("llama", "sdpa").model.layers[0].self_attn
    x, turn = torch.randn(1, 5, 32), torch.ones(1, 5, 8)
    with torch.no_grad(), regard.watch(attention) as seen:
        attention(x, (turn, turn))
    assert list(seen) == [""]


def test_attention_by_hand_in_their_code_is_seen() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ x

    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, x[0]).softmax(-1)

    class Rotary(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.mT

    for kind in (Odd, Router, Rotary):
        kind.__module__ = "transformers.models.odd"
    assert [reach.needs_asking([kind()]) for kind in (Odd, Router, Rotary)] == [True, False, False]
    model = nn.Sequential(build("llama", "sdpa").model.embed_tokens, Odd())
    with torch.no_grad(), regard.watch(model) as seen:
        model(tokens())
    assert [layer.calls for layer in seen.values()] == [1]


@pytest.mark.compiled
def test_a_model_compiled_from_outside_is_seen() -> None:
    """The compiler knows somebody who watches by a function mode."""
    model = build("llama", "sdpa")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        want = compiled(tokens()).logits
        with regard.watch(model) as seen:
            got = compiled(tokens()).logits
        again = compiled(tokens()).logits
    assert [layer.calls for layer in seen.values()] == [1, 1]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(again, want)
