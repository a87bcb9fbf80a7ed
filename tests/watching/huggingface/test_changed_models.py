"""Attention modules that come into a model of transformers while it is watched: the watching walks
through a model once, so they are named where they would be missing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import regard
from regard import RegardError
from regard.errors import RegardWarning

transformers = pytest.importorskip("transformers")

from tests.watching.huggingface.test_huggingface import build, tokens  # noqa: E402


def replace(model: Any) -> None:
    model.model.layers[1].self_attn = copy.deepcopy(model.model.layers[1].self_attn)


def replace_its_layer(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])


def make_anew(model: Any) -> None:
    """With the config of the others: its calls are seen, and nobody knows whose they are."""
    attention = type(model.model.layers[1].self_attn)
    model.model.layers[1].self_attn = attention(model.config, 1)


def add(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    model.model.layers[2].self_attn.layer_idx = 2
    model.config.num_hidden_layers = 3


CHANGES: dict[Callable[[Any], None], str] = {
    replace: "model.layers.1.self_attn",
    replace_its_layer: "model.layers.1.self_attn",
    make_anew: "model.layers.1.self_attn",
    add: "model.layers.2.self_attn",
}


def read(model: Any) -> None:
    model(tokens(), use_cache=False)


@pytest.mark.parametrize("ran", [True, False], ids=["ran before", "first"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_came_while_it_was_watched_is_named(change: Callable[[Any], None], ran: bool) -> None:
    model = build("llama", "sdpa")
    failing = pytest.raises(
        RegardError,
        match=rf"{CHANGES[change]} \(it came into the model while that was watched\)[\s\S]*"
        "change the model first",
    )
    with failing, regard.watch(model):
        if ran:
            read(model)
        change(model)
        read(model)
    with regard.watch(model) as seen:
        read(model)
    assert CHANGES[change] in seen


def test_detaching_warns_of_it() -> None:
    model = build("llama", "sdpa")
    watch = regard.watch(model)
    watch.attach()
    replace(model)
    read(model)
    with pytest.warns(RegardWarning, match=r"layers\.1\.self_attn \(it came into the model"):
        watch.detach()


def test_other_layers_may_be_replaced() -> None:
    model = build("llama", "sdpa")
    with regard.watch(model, layers="*.0.self_attn") as seen:
        replace(model)
        read(model)
    assert list(seen) == ["model.layers.0.self_attn"]


def test_what_does_not_attend_or_only_moved_raises_nothing(tmp_path: Path) -> None:
    model = build("llama", "sdpa")
    with regard.watch(model, keep="traces", spill=tmp_path / "traces") as seen:
        model.model.layers[1].mlp = copy.deepcopy(model.model.layers[1].mlp)
        model.model.layers[0].self_attn, model.model.layers[1].self_attn = (
            model.model.layers[1].self_attn,
            model.model.layers[0].self_attn,
        )
        read(model)
    assert sorted(seen) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_a_monitor_follows_them_from_the_next_report_on() -> None:
    model = build("llama", "sdpa").train()
    reports: list[Any] = []
    with regard.Monitor(model, every=2, look=1, to=reports.append) as monitor:
        for step in range(6):
            if step == 2:
                replace(model)
            model(tokens(), use_cache=False).logits.square().mean().backward()
            monitor.step()
    both = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert [sorted(report.layers) for report in reports] == [both, both[:1], both]
