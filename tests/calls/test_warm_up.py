"""Kernels that are ready before they are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard import RegardError
from regard.calls.warm_up import _width_of


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_on_a_cpu_calls_run_as_before(dtype: torch.dtype, gradients: bool) -> None:
    assert regard.warm_up(width=16, dtype=dtype, device="cpu", gradients=gradients) == 0


class Config:
    def __init__(self, **sizes: Any) -> None:
        vars(self).update(sizes)


class Model(nn.Module):
    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.config = Config(**sizes)


@pytest.mark.parametrize(
    ("model", "width"),
    [
        (Model(head_dim=80, hidden_size=64, num_attention_heads=4), 80),
        (Model(hidden_size=64, num_attention_heads=4), 16),
        (Model(n_embd=96, n_head=4), 24),
        (Model(text_config=Config(hidden_size=64, num_attention_heads=2)), 32),
        (nn.Sequential(nn.Linear(3, 3), nn.MultiheadAttention(32, 4)), 8),
        (nn.TransformerEncoderLayer(64, 4), 16),
        (regard.nn.MultiHeadAttention(64, 2), 32),
    ],
)
def test_a_model_says_how_wide_its_heads_are(model: nn.Module, width: int) -> None:
    assert _width_of(model) == width


def test_a_model_is_warmed_up_where_it_is() -> None:
    assert regard.warm_up(nn.MultiheadAttention(32, 4)) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "head dimension"),
        ({"width": 0}, "width is that of a head"),
        ({"model": nn.Linear(3, 3)}, "was not found"),
        ({"width": 8, "dtype": torch.int64, "device": "cpu"}, "floating-point type"),
    ],
)
def test_what_cannot_be_warmed_up_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RegardError, match=said):
        regard.warm_up(**given)


def test_on_a_card_what_is_not_there_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from regard.backends.triton.launches import launched as launching
    from regard.backends.triton.pairs import INTERPRETED
    from regard.backends.triton.prepared import warming

    if INTERPRETED.value:
        pytest.skip("interpreted kernels are not compiled")
    compiled: list[str] = []

    class NoDevice:
        def __init__(self, device: int) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *how: object) -> None: ...

    def compile_(self: Any, arguments: Any, constants: Any) -> str:
        compiled.append(self.signature_of(arguments, constants))
        return compiled[-1]

    monkeypatch.setattr(torch.cuda, "device", NoDevice)
    monkeypatch.setattr(warming, "capability", lambda device: 90)
    monkeypatch.setattr(launching.Launched, "compiled", compile_)
    ready = launching.ByTriton(None, [])
    monkeypatch.setattr(launching, "_loaded", lambda compiled, names, one: ready)
    # A width that nobody has, so that nothing else is remembered of it.
    card = torch.device("cuda", 7)
    how = {"masks": [regard.masks.causal()], "gradients": True}
    many = warming.warm_up(72, torch.bfloat16, card, **how)
    assert many == len(compiled) == len(set(compiled)) > 5
    assert {name.split()[0] for name in compiled} >= {"forward_tiles", "mend", "queries", "merge"}
    assert warming.warm_up(72, torch.bfloat16, card, **how) == 0
