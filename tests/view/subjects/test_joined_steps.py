"""What a model read and what it wrote, as one map."""

from __future__ import annotations

import torch

import regard
from regard import biases, masks
from regard.models import CausalConfig, CausalModel
from regard.seen import Layer, Seen
from regard.view.atlas import Atlas
from regard.view.subjects.joined_steps import JoinedSteps
from tests.seen.test_joint_trace import STEPS, steps, text


def test_an_atlas_joins_what_a_model_wrote() -> None:
    torch.manual_seed(0)
    model = CausalModel(CausalConfig(vocabulary=50, d_model=16, layers=2, heads=2)).eval()
    ids = torch.tensor([[0, 7, 3, 9]])
    with regard.watch(model, keep="traces") as seen:
        written = model.continued(ids, 5)
    with torch.no_grad(), regard.watch(model, keep="traces") as whole:
        model(written[:, :-1])
    atlas, other = Atlas.of(seen), Atlas.of(whole)
    assert [m.shape for m in atlas.maps] == [(2, 8, 8)] * 2
    for mine, theirs in zip(atlas.maps, other.maps, strict=True):
        assert len(mine.traces) == 1
        assert mine.describe()["starts"] == [0, 4, 5, 6, 7]
        assert mine.describe()["band"] == theirs.describe()["band"]
        torch.testing.assert_close(
            mine.weights(1, range(8), range(8)), theirs.weights(1, range(8), range(8)),
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip


def test_keys_that_went_and_cannot_be_put_back_are_drawn_call_by_call() -> None:
    q, k, v = text()
    layer = Layer("attn")
    for step, (a, b) in enumerate(STEPS):
        here = slice(max(0, a - 3), b)
        bias = biases.alibi([0.1] * 4)
        mask = masks.causal() & masks.window(3)
        t = regard.trace(q[:, :, a:b], k[:, :, here], v[:, :, here], mask=mask, bias=bias)
        layer.take(t, step, step, keep=True)
    seen = Seen("toy")
    seen._layers["attn"] = layer
    maps = Atlas.of(seen).maps
    assert [m.name for m in maps] == ["attn · 1", "attn · 2", "attn · 3", "attn · 4"]
    assert [m.shape for m in maps] == [(4, 5, 5), (4, 1, 4), (4, 3, 6), (4, 1, 4)]


def test_steps_that_look_at_the_same_other_text_are_one_map() -> None:
    q, k, v = text()
    layer = Layer("cross")
    for step in range(3):
        layer.take(regard.trace(q[:, :, step : step + 1], k, v), step, step, keep=True)
    seen = Seen("toy")
    seen._layers["cross"] = layer
    (only,) = Atlas.of(seen).maps
    assert only.shape == (4, 3, 10)
    want = regard.trace(q[:, :, :3], k, v).weights()[0, 1]
    torch.testing.assert_close(only.weights(1, range(3), range(10)), want)


def test_steps_are_folded_while_they_come() -> None:
    seen = Seen("toy")
    layer, apart = seen.layer("attn"), seen.layer("apart")
    fold = JoinedSteps(seen)
    for step, t in enumerate(steps()):
        layer.take(t, step, step, keep=True)
        apart.take(regard.trace(t.inputs.q, t.inputs.k, t.inputs.v), step, step, keep=True)
        fold()
        assert len(layer.traces) == 1
    assert fold.starts == {"attn": [0, 5, 6, 9]}
    assert len(apart.traces) == 4
    whole = regard.trace(*text(), mask=masks.causal())
    torch.testing.assert_close(layer.trace.weights(), whole.weights())
    assert (layer.runs, layer.steps) == ([0], [0])
