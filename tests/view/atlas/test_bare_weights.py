"""Weights without a trace are looked at as traces are."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

import regard
from regard import RegardError, Trace, masks, view
from regard.view.atlas import head_figures, looked_at

WORDS = ["the", "cat", "sat", "down"]


def told(what: object) -> str:
    console = Console(width=90, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


@pytest.fixture
def traced() -> Trace:
    q, k = torch.randn(2, 2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    return regard.trace(q, k, k, mask=masks.causal())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_question_has_the_answer_of_the_weights(traced: Trace, dtype: torch.dtype) -> None:
    weights = traced.weights().to(dtype)
    mine = Trace.of_weights(weights)
    assert torch.allclose(mine.weights().to(dtype), weights, rtol=1e-6, atol=0)
    near = 1e-6 if dtype != torch.bfloat16 else 2e-2
    assert torch.allclose(mine.entropy.float(), traced.entropy, atol=near)
    assert torch.allclose(mine.received().float(), traced.received(), atol=4 * near)
    assert torch.equal(mine.top(1).indices, weights.float().argmax(-1, keepdim=True))
    with pytest.raises(RegardError, match="without values"):
        _ = mine.out


def test_rows_that_see_nothing_have_no_weights() -> None:
    weights = torch.tensor([[0.0, 0.0], [0.5, 0.5]])
    mine = Trace.of_weights(weights)
    assert torch.equal(mine.weights(), weights)
    assert mine.entropy[0] == 0


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (torch.randn(3, 3), r"rows that do not; the first, \[0\]"),
        (torch.full((2, 2), 0.7), "adds up to 1.4"),
        (torch.full((2, 2), torch.nan), "adds up to nan"),
        (torch.ones(3), r"torch.float32 \[3\]"),
        (torch.ones(2, 2, dtype=torch.long), r"torch.int64 \[2, 2\]"),
    ],
)
def test_what_is_no_weights_is_refused(
    weights: torch.Tensor, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(RegardError, match=says):
        Trace.of_weights(weights)


def test_views_show_the_same_as_of_the_trace(traced: Trace, tmp_path: Path) -> None:
    weights = traced.weights()
    for many in (weights, weights[0], weights[0, 1]):
        head = 0 if many.ndim == 2 else 1
        assert told(view.heat_map(many, WORDS, head=head)) == told(
            view.heat_map(traced, WORDS, head=1)
        ).replace("head 1", f"head {head}")
    assert told(view.shaded(weights, WORDS, 3)) == told(view.shaded(traced, WORDS, 3))
    assert view.picture.heat_map(weights, WORDS).axes
    assert view.picture.arcs(weights, WORDS, 3).axes
    path = view.page(weights, tmp_path / "page.html", tokens=WORDS)
    assert "down" in Path(path).read_text()


def test_a_model_gives_a_tensor_for_each_layer_and_step(traced: Trace) -> None:
    one = traced.weights()
    layers = (one, one.flip(1))
    found = head_figures(layers)
    assert list(found.paths) == ["0", "1"]
    right = head_figures(traced)
    assert torch.allclose(torch.tensor(found.entropy[0]), torch.tensor(right.entropy[0]))
    assert torch.allclose(torch.tensor(found.distance[1]), torch.tensor(right.distance[0]).flip(0))
    steps = looked_at([layers, tuple(t[:, :, -1:] for t in layers)])
    assert [len(layer.traces) for layer in steps.values()] == [2, 2]
    with pytest.raises(RegardError, match="hold no weights"):
        looked_at((None, None))


def test_attentions_of_a_hugging_face_model_are_looked_at_without_working_them_out() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.arange(6)[None]
    right = eager.eval()(ids, output_attentions=True).attentions
    eager.set_attn_implementation("regard")
    with torch.no_grad():
        ours = eager(ids, output_attentions=True).attentions
    first = looked_at(ours)["0"].traces[0]
    assert first is ours[0].source
    for layer, weights in enumerate(right):
        mine = looked_at(right)[str(layer)].traces[0].weights()
        assert torch.allclose(mine, weights, atol=1e-6)
        assert torch.allclose(looked_at(ours)[str(layer)].traces[0].weights(), weights, atol=1e-5)
