"""The masks of well-known models, each one line, drawn and checked against a rule."""

from __future__ import annotations

from textwrap import dedent

import pytest
import torch

import regard
from regard import masks

LAYOUT = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]]).bool()
IDS = [0, 0, 0, 1, 1, 2]

COMPOSITIONS = {
    "longformer": (
        masks.window(1, 1) | masks.global_tokens([0]),
        (6, 6),
        lambda x: abs(x.j - x.p) <= 1 or x.j == 0 or x.p == 0,
        """\
        ████████████
        ██████······
        ████████····
        ██··██████··
        ██····██████
        ██······████""",
    ),
    "longformer-causal": (
        masks.causal() & (masks.window(1) | masks.global_tokens([0, 2])),
        (6, 6),
        lambda x: x.j <= x.p and (x.p - x.j <= 1 or x.j in (0, 2) or x.p in (0, 2)),
        """\
        ██··········
        ████········
        ██████······
        ██··████····
        ██··██████··
        ██··██··████""",
    ),
    "prefix-lm": (
        masks.causal() | masks.prefix(3),
        (5, 5),
        lambda x: x.j <= x.p or x.j < 3,
        """\
        ██████····
        ██████····
        ██████····
        ████████··
        ██████████""",
    ),
    "packed": (
        masks.causal() & masks.documents(IDS),
        (6, 6),
        lambda x: x.j <= x.p and IDS[x.j] == IDS[x.p],
        """\
        ██··········
        ████········
        ██████······
        ······██····
        ······████··
        ··········██""",
    ),
    "packed-decoding": (
        masks.causal() & masks.documents(IDS),
        (2, 6),
        lambda x: x.j <= x.p and IDS[x.j] == IDS[x.p],
        """\
        ······████··
        ··········██""",
    ),
    "packed-prefix-lm": (
        masks.documents(IDS) & (masks.causal() | masks.prefix(2)),
        (6, 6),
        lambda x: IDS[x.j] == IDS[x.p] and (x.j <= x.p or x.j < 2),
        """\
        ████········
        ████········
        ██████······
        ······██····
        ······████··
        ··········██""",
    ),
    "dilated": (
        masks.window(4, 2) & masks.dilated(2),
        (6, 6),
        lambda x: -4 <= x.j - x.p <= 2 and (x.j - x.p) % 2 == 0,
        """\
        ██··██······
        ··██··██····
        ██··██··██··
        ··██··██··██
        ██··██··██··
        ··██··██··██""",
    ),
    "strided": (
        masks.causal() & (masks.window(2) | masks.dilated(3)),
        (7, 7),
        lambda x: x.j <= x.p and (x.p - x.j <= 2 or (x.p - x.j) % 3 == 0),
        """\
        ██············
        ████··········
        ██████········
        ████████······
        ··████████····
        ····████████··
        ██····████████""",
    ),
    "block-sparse": (
        masks.blocks(LAYOUT, 2),
        (6, 6),
        lambda x: bool(LAYOUT[x.i // 2, x.j // 2]),
        """\
        ████········
        ████········
        ████████····
        ████████····
        ····████████
        ····████████""",
    ),
    "block-sparse-causal": (
        masks.causal() & masks.blocks(LAYOUT, 2),
        (5, 5),
        lambda x: x.j <= x.p and bool(LAYOUT[x.i // 2, x.j // 2]),
        """\
        ██········
        ████······
        ██████····
        ████████··
        ····██████""",
    ),
    "sinks": (
        masks.causal() & (masks.window(2) | masks.prefix(1)),
        (6, 6),
        lambda x: x.j <= x.p and (x.p - x.j <= 2 or x.j < 1),
        """\
        ██··········
        ████········
        ██████······
        ████████····
        ██··██████··
        ██····██████""",
    ),
    "sinks-decoding": (
        masks.causal() & (masks.window(2) | masks.prefix(1)),
        (1, 6),
        lambda x: x.j <= x.p and (x.p - x.j <= 2 or x.j < 1),
        "██····██████",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_one_line_says_it(name, by_hand):
    mask, size, rule, drawing = COMPOSITIONS[name]
    assert mask.draw(*size) == dedent(drawing)
    assert torch.equal(mask.dense(*size), by_hand(rule, 1, 1, *size))


@pytest.mark.parametrize("backend", [None, "tiled", "reference"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_documents_do_not_leak(backend, causal):
    ids = torch.tensor([0] * 37 + [1] * 63)
    mask = masks.documents(ids)
    if causal:
        mask = masks.causal() & mask
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 100, 8, generator=draw) for _ in range(3))
    before = regard.attention(q, k, v, mask=mask, backend=backend)
    first = ids == 0
    for other in (q, k, v):
        other[:, :, first] = 50 * torch.randn(2, 3, 37, 8, generator=draw)
    after = regard.attention(q, k, v, mask=mask, backend=backend)
    assert torch.equal(before[:, :, ~first], after[:, :, ~first])
    assert not torch.allclose(before[:, :, first], after[:, :, first])
    k[:, :, first], v[:, :, first] = torch.nan, torch.inf
    poisoned = regard.attention(q, k, v, mask=mask, backend=backend)
    torch.testing.assert_close(poisoned[:, :, ~first], before[:, :, ~first])


def test_packed_documents_are_as_if_alone():
    lengths = [5, 1, 9, 6]
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 21, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    packed = regard.attention(q, k, v, mask=masks.causal() & masks.documents(ids))
    parts = zip(*(t.split(lengths, 2) for t in (q, k, v)), strict=True)
    alone = [regard.attention(*part, mask=masks.causal()) for part in parts]
    torch.testing.assert_close(packed, torch.cat(alone, 2))


def test_padding_is_as_if_cut_off():
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, 2, 9, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    lengths = [9, 1, 4]
    out = regard.attention(q, k, v, mask=masks.padding(lengths))
    for b, n in enumerate(lengths):
        alone = regard.attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        torch.testing.assert_close(out[b : b + 1], alone)
