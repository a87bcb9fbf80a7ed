"""Prefill and decoding steps, joined: the same as reading the whole text at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.masks import Mask
from regard.models import CausalConfig, CausalModel
from regard.traces import Trace
from regard.view.atlas import Atlas
from regard.view.joining import Folding, joined
from regard.watching.seen import Layer, Seen

STEPS = ((0, 5), (5, 6), (6, 9), (9, 10))


def text(n: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(n)
    return torch.randn(1, 4, n, 8), torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)


def steps(mask: Callable[[int, int], Mask | None] = lambda a, b: masks.causal()) -> list[Trace]:
    q, k, v = text()
    return [regard.trace(q[:, :, a:b], k[:, :, :b], v[:, :, :b], mask=mask(a, b)) for a, b in STEPS]


@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.causal() & masks.window(3)], ids=["causal", "window"]
)
def test_steps_are_the_whole_text(mask: Mask) -> None:
    found = joined(steps(lambda a, b: mask))
    whole = regard.trace(*text(), mask=mask)
    assert found is not None
    torch.testing.assert_close(found.weights(), whole.weights())
    for name in ("out", "lse", "max_logit", "entropy"):
        torch.testing.assert_close(getattr(found, name), getattr(whole, name))
    assert found.mask == mask
    assert found.inputs.k.shape == (1, 2, 10, 8)


def test_single_steps_may_go_without_a_mask() -> None:
    found = joined(steps(lambda a, b: None if b - a == 1 else masks.causal()))
    assert found is not None
    whole = regard.trace(*text(), mask=masks.causal())
    torch.testing.assert_close(found.weights(), whole.weights())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a, b: None,
        lambda a, b: None if a == 6 else masks.causal(),
        lambda a, b: masks.causal() & masks.window(2) if a == 9 else masks.causal(),
        lambda a, b: masks.causal(offset=a) & masks.keep(torch.ones(b - a, b, dtype=torch.bool)),
    ],
    ids=["full", "several rows without a mask", "another window", "no band"],
)
def test_masks_that_are_not_one_mask_stay_apart(
    spoil: Callable[[int, int], Mask | None],
) -> None:
    assert joined(steps(spoil)) is None


def test_keys_that_a_window_let_go_are_there_again() -> None:
    mask = masks.causal() & masks.window(3)
    q, k, v = text()
    held = [
        regard.trace(
            q[:, :, a:b], k[:, :, max(0, a - 3) : b], v[:, :, max(0, a - 3) : b], mask=mask
        )
        for a, b in STEPS
    ]
    assert held[-1].inputs.shape.K == 4
    found = joined(held)
    assert found is not None
    torch.testing.assert_close(found.inputs.k, k)
    whole = regard.trace(q, k, v, mask=mask)
    torch.testing.assert_close(found.weights(), whole.weights())
    torch.testing.assert_close(found.lse, whole.lse)


def test_keys_that_changed_or_went_unseen_stay_apart() -> None:
    first, *rest = steps()
    q, k, v = text()
    other = k[:, :, :5] + 1e-3
    changed = regard.trace(q[:, :, :5], other, v[:, :, :5], mask=masks.causal())
    assert joined([changed, *rest]) is None
    gone = regard.trace(q[:, :, 9:], k[:, :, 2:], v[:, :, 2:], mask=masks.causal())
    assert joined([first, *rest[:-1], gone]) is None
    biased = [
        regard.trace(t.inputs.q, t.inputs.k, t.inputs.v, mask=t.mask, bias=biases.alibi([0.1] * 4))
        for t in (first, *rest)
    ]
    assert joined(biased) is None


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
    fold = Folding(seen)
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
