"""Words of other libraries get an answer that shows how it is said here, and the answer is true."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard import RegardError, biases, interpret, masks
from regard.calls.peer_arguments import INSTEAD

X = torch.randn(1, 2, 4, 8)


@pytest.mark.parametrize("function", [regard.attention, regard.trace, regard.plan])
@pytest.mark.parametrize("name", INSTEAD)
def test_a_word_of_a_peer_is_told_in_ours(name: str, function: Callable[..., Any]) -> None:
    with pytest.raises(RegardError) as refused:
        function(X, X, X, **{name: True})
    said = str(refused.value)
    assert f"{function.__name__} has no argument {name}=" in said
    assert INSTEAD[name] in said


def test_any_other_word_is_told_what_is_accepted() -> None:
    with pytest.raises(RegardError, match="no argument maks=") as refused:
        regard.attention(X, X, X, maks=1)  # type: ignore[arg-type]
    assert "cu_seqlens" in str(refused.value)
    assert "do:" not in str(refused.value)


@pytest.mark.parametrize("instead", sorted(set(INSTEAD.values())))
def test_what_is_told_exists(instead: str) -> None:
    names = vars(regard) | {"masks": masks, "biases": biases, "interpret": interpret}
    found = re.findall(r"\b(masks|biases|interpret|regard)\.(\w+)", instead)
    for module, name in found:
        assert hasattr(names.get(module, regard), name), instead
    for argument in re.findall(r"\b(\w+)=", instead.split("masks.from")[0]):
        assert argument in regard.attention.__annotations__, instead


def test_a_causal_call_is_what_it_says() -> None:
    said = INSTEAD["is_causal"].removeprefix("mask=")
    mask = eval(compile(ast.parse(said, mode="eval"), "said", "eval"), {"masks": masks})
    out = regard.attention(X, X, X, mask=mask)
    expected = torch.nn.functional.scaled_dot_product_attention(X, X, X, is_causal=True)
    torch.testing.assert_close(out, expected)
