"""Settings of kernels: on Hopper those that were measured, elsewhere those that fit the card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch

pytest.importorskip("triton")

from regard import biases, masks
from regard.backends.triton import arguments
from regard.backends.triton.settings import cards, tuning
from regard.backends.triton.settings.tuning import (
    backward_settings,
    forward_settings,
    looking_settings,
)
from regard.inputs import AttentionInputs, check


@contextmanager
def on(capability: int) -> Iterator[None]:
    """Meta tensors stand for those on such a card."""
    token = arguments.stands_for.set(capability)
    try:
        yield
    finally:
        arguments.stands_for.reset(token)


@cache
def calls() -> list[tuple[str, AttentionInputs]]:
    """Calls of all kinds that settings differ for, by name."""
    return list(_calls())


def _calls() -> Iterator[tuple[str, AttentionInputs]]:
    for dtype in (torch.bfloat16, torch.float32):
        for width in (32, 64, 80, 128, 256):
            for kind in ("none", "causal", "padding", "documents", "holes", "dense", "relative"):
                for Q, K in ((1, 4096), (40, 4096), (256, 256), (4096, 4096)):
                    # Such masks are looked at pair by pair.
                    if kind in ("documents", "holes"):
                        Q, K = min(Q, 512), min(K, 512)
                    for groups in (8, 2):
                        name = f"{str(dtype)[6:]} {width} {kind} {Q}x{K} {groups}"
                        yield name, _call(dtype, width, kind, Q, K, groups)


def _call(
    dtype: torch.dtype, width: int, kind: str, Q: int, K: int, groups: int, B: int = 1
) -> AttentionInputs:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    k = empty(B, groups, K, width)
    mask: masks.Mask | None = None
    bias: biases.Bias | None = None
    match kind:
        case "causal":
            mask = masks.causal()
        case "padding":
            mask = masks.padding([K])
        case "documents":
            mask = masks.documents(torch.arange(K) // 100)
        case "holes":
            mask = masks.where(lambda b, h, q, k: (q + k) % 3 != 0)
        case "dense":
            bias = biases.dense(empty(1, 8, Q, K))
        case "relative":
            bias = biases.relative(empty(8, 65))
    return check(
        empty(B, 8, Q, width), k, k, mask=mask, score=None, bias=bias, softcap=None, sink=None,
        scale=None, dropout=0.0, training=False,
    )  # fmt: skip


def test_on_hopper_what_was_measured_there() -> None:
    """Nothing is made smaller for want of memory."""
    with on(90):
        for name, x in calls():
            for told in (True, False):
                assert forward_settings(x, statistics=told) == tuning._forward_settings(
                    x, statistics=told
                ), name
            assert backward_settings(x) == tuning._backward_settings(x), name
            assert looking_settings(x) == tuning._looking_settings(x), name


@pytest.mark.parametrize(
    ("kind", "n", "hopper"),
    [("none", 256, False), ("none", 512, True), ("causal", 512, False), ("causal", 1000, True)],
)
def test_narrow_heads_have_the_kernel_for_hopper_from_some_length_on(
    kind: str, n: int, hopper: bool
) -> None:
    with on(90):
        x = _call(torch.bfloat16, 64, kind, n, n, 8, B=64)
        how = forward_settings(x, statistics=True)
        assert (how.hopper, how.queued) == (hopper, hopper)


@pytest.mark.parametrize("capability", [80, 86, 89])
def test_no_copy_engine_is_used_where_there_is_none(capability: int) -> None:
    with on(capability):
        for name, x in calls():
            for told in (True, False):
                how = forward_settings(x, statistics=told)
                assert (how.described, how.hopper, how.registers) == (False, False, None), name


def test_keys_are_split_by_how_many_multiprocessors_there_are() -> None:
    found = {}
    for capability in (89, 90):
        with on(capability):
            x = _call(torch.bfloat16, 64, "none", 1, 16384, 8)
            found[capability] = forward_settings(x, statistics=True).splits
    assert found == {89: 16, 90: 64}


def test_an_unknown_card_is_given_no_more_than_all_have() -> None:
    assert cards.standing_for(121) == cards.Card(12, 101_376, 132)


def test_of_a_card_that_is_there_pytorch_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told:
        multi_processor_count = 20
        shared_memory_per_block_optin = 65_536

    device = torch.device("cuda", 7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Told)
    monkeypatch.setattr(cards, "capability", lambda _: 75)
    found = cards._found.__wrapped__(device)
    assert found == cards.Card(7, 65_536, 20)
    assert not found.copies


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_width_is_ours_or_cudnn_s(capability: int) -> None:
    """Narrow heads, which Hopper's kernel does not take, are cuDNN's however long the text."""
    with on(capability):
        for width in (1, 8, 16, 17, 32, 64, 128, 256, 300):
            for n in (16, 16384):
                quicker = tuning.outruns_cudnn(_call(torch.bfloat16, width, "causal", n, n, 8))
                wide = width in (64, 128, 256)
                assert quicker == (capability == 90 and wide and n == 16384), (width, n)
