"""Prefill and decoding steps, joined: the same as reading the whole text at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, biases, masks
from regard.masks import Mask
from regard.seen import Layer, joined
from regard.traces import Trace

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


def left_padded(mask: Mask) -> tuple[list[Trace], Mask]:
    """Two sequences, the second shorter: its first places are padding at every step."""
    q, k, v = (torch.cat([t, t.flip(1)]) for t in text())
    real = torch.ones(2, 10, dtype=torch.bool)
    real[1, :2] = False
    found = [
        regard.trace(
            q[:, :, a:b],
            k[:, :, :b],
            v[:, :, :b],
            mask=mask & masks.keep(real[:, None, None, :b]),
        )
        for a, b in STEPS
    ]
    return found, masks.keep(real[:, None, None])


@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.causal() & masks.window(3)], ids=["causal", "window"]
)
def test_padding_stays_padding(mask: Mask) -> None:
    held, padding = left_padded(mask)
    found = joined(held)
    assert found is not None
    q, k, v = (torch.cat([t, t.flip(1)]) for t in text())
    whole = regard.trace(q, k, v, mask=mask & padding)
    torch.testing.assert_close(found.weights(), whole.weights())
    torch.testing.assert_close(found.lse, whole.lse)
    assert found.mask == mask & padding
    assert found[1].weights(queries=[9])[..., :2].eq(0).all()


def test_padding_that_changes_between_steps_stays_apart() -> None:
    held, _ = left_padded(masks.causal())
    other = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    x = held[-1].inputs
    held[-1] = regard.trace(x.q, x.k, x.v, mask=masks.causal() & masks.keep(other))
    assert joined(held) is None


@pytest.mark.parametrize("mask", [None, masks.padding([7])], ids=["full", "padding"])
def test_steps_that_look_at_another_text(mask: Mask | None) -> None:
    q, k, v = text()
    held = [regard.trace(q[:, :, a:b], k, v, mask=mask) for a, b in STEPS]
    found = joined(held)
    assert found is not None
    whole = regard.trace(q, k, v, mask=mask)
    torch.testing.assert_close(found.weights(), whole.weights())
    assert found.mask == mask
    other = regard.trace(q[:, :, :1], k + 1, v, mask=mask)
    assert joined([*held, other]) is None


def test_a_layer_gives_the_trace_of_all_its_steps() -> None:
    layer = Layer("attn")
    with pytest.raises(RegardError, match="'attn' has no traces"):
        _ = layer.joined
    for step, t in enumerate(steps()):
        layer.take(t, step, step, keep=True)
        if step == 0:
            assert layer.joined is layer.traces[0]
    torch.testing.assert_close(
        layer.joined.weights(), regard.trace(*text(), mask=masks.causal()).weights()
    )
    layer.take(steps()[0], 4, 0, keep=True)
    with pytest.raises(RegardError, match=r"more than one text\n.*2 texts in 5 traces"):
        _ = layer.joined
    apart = Layer("apart")
    for step, t in enumerate(steps(lambda a, b: None)):
        apart.take(t, step, step, keep=True)
    with pytest.raises(RegardError, match="the steps of 'apart' cannot be joined into one trace"):
        _ = apart.joined
