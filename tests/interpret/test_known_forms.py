"""A model's form is seen once, and again when it may have become another."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from regard import interpret
from regard.interpret.head_scores import known_forms

QUICK: dict[str, Any] = {"random": False, "probes": False}
IDS = torch.randint(40, (1, 9), generator=torch.Generator().manual_seed(1))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The texts that forms were seen with."""
    texts: list[Any] = []
    look = known_forms.form_of

    def counted(runner: Any, text: Any) -> Any:
        texts.append(text)
        return look(runner, text)

    monkeypatch.setattr(known_forms, "form_of", counted)
    return texts


def test_the_form_of_a_model_is_seen_once(seen: list[Any]) -> None:
    model = llama()
    first = interpret.heads(model, IDS, **QUICK)
    again = interpret.heads(model, IDS, **QUICK)
    assert len(seen) == 1
    assert str(again.records()) == str(first.records())
    assert "own logit" in again.names
    interpret.heads(llama(), IDS, **QUICK)
    assert len(seen) == 2


def test_a_text_of_another_kind_shows_it_again(seen: list[Any]) -> None:
    model = llama()
    for text in (IDS, IDS[:, :5], {"input_ids": IDS}, {"input_ids": IDS, "use_cache": False}):
        for _ in range(2):
            interpret.heads(model, [text], **QUICK)
    assert len(seen) == 4


def _weight_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.add_(1)


def _weight_as_data(model: Any) -> None:
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.clone()


def _module(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj = nn.Linear(24, 24, bias=False)


def _layers(model: Any) -> None:
    del model.model.layers[1]


def _hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def _forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


def _setting(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.1


def _config(model: Any) -> None:
    model.config.use_cache = False


CHANGES: list[Callable[[Any], None]] = [
    _weight_in_place, _weight_as_data, _module, _layers, _hook, _forward, _setting, _config
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_shows_its_form_again(
    change: Callable[[Any], None], seen: list[Any]
) -> None:
    model = llama()
    interpret.heads(model, IDS, **QUICK)
    change(model)
    interpret.heads(model, IDS, **QUICK)
    assert len(seen) == 2


def test_a_class_whose_code_is_replaced_shows_its_form_again(
    monkeypatch: pytest.MonkeyPatch, seen: list[Any]
) -> None:
    model = llama()
    interpret.heads(model, IDS, **QUICK)
    block = type(model.model.layers[0])
    before = block.forward
    monkeypatch.setattr(block, "forward", lambda self, *a, **k: 0.5 * before(self, *a, **k))
    found = interpret.heads(model, IDS, **QUICK)
    assert len(seen) == 2
    assert "own logit" in found.names


def test_a_layer_whose_output_is_scaled_since_is_not_taken_for_one_that_is_added() -> None:
    model = llama()
    assert "own logit" in interpret.heads(model, IDS, **QUICK).names
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _, __, out: (0.5 * out[0], *out[1:]))
    found = interpret.heads(model, IDS, **QUICK)
    assert "own logit" not in found.names
    assert any("copying" in note for note in found.notes)


def test_what_cannot_be_compared_is_seen_anew(seen: list[Any]) -> None:
    model = llama()
    model.lock = threading.Lock()
    for _ in range(2):
        interpret.heads(model, IDS, **QUICK)
    assert len(seen) == 2
    own: list[Any] = []
    own.append(own)
    model.lock = own
    interpret.heads(model, IDS, **QUICK)
    assert len(seen) == 3


def test_what_is_remembered_holds_no_model() -> None:
    model = llama()
    interpret.heads(model, IDS, **QUICK)
    key, here, part = id(model), weakref.ref(model), weakref.ref(model.lm_head.weight)
    assert key in known_forms._KNOWN
    del model
    gc.collect()
    assert here() is None
    assert part() is None
    assert key not in known_forms._KNOWN
