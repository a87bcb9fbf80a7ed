"""A pytest plugin that makes attn_implementation="regard" of every "sdpa" that transformers chooses
or is asked for, and of the "eager" it chooses where a model can have others but not that (sinks).
What a test does with eager attention, to compare with, stays eager."""

from __future__ import annotations

import functools
from typing import Any

import outcome_file
import pytest
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import regard as regard  # it registers the name

_calls = 0
_attend = ALL_ATTENTION_FUNCTIONS["regard"]
_chosen = PreTrainedModel.get_correct_attn_implementation


@functools.wraps(_attend)
def _counted(*args: Any, **how: Any) -> Any:
    global _calls
    _calls += 1
    return _attend(*args, **how)


@functools.wraps(_chosen)
def _renamed(self: PreTrainedModel, asked: str | None, *args: Any, **how: Any) -> str:
    found = _chosen(self, asked, *args, **how)
    fell_back = asked is None and found == "eager" and self._supports_attention_backend
    return "regard" if found == "sdpa" or fell_back else found


AttentionInterface.register("regard", _counted)
PreTrainedModel.get_correct_attn_implementation = _renamed


def pytest_sessionfinish(session: pytest.Session) -> None:
    outcome_file.write(calls=_calls)
