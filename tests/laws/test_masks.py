"""Laws of masks: whatever is combined with whatever, logic holds and every view agrees."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest.mock import patch

import jaxtyping
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parity import cases
from torch import Tensor

from regard import RegardError, masks
from regard.masks.algebra import Mask, pairs
from regard.masks.tiles import survey
from regard.values import Shape, decode, encode

LAW = settings(
    max_examples=300 if cases.WHOLE else 50, deadline=None, database=None, derandomize=True
)
CPU = torch.device("cpu")


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return Shape(*(draw(st.integers(low, high)) for low, high in ((1, 3), (1, 2), (0, 9), (0, 9))))


def leaf(draw: st.DrawFn, shape: Shape) -> Mask:
    """Any single mask that fits a call of this shape."""

    def one_of(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    B, H, Q, K = shape
    chance = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    side, size = (None, 0, 1, 2, 5), one_of(1, 2, 3, 4)
    offset = one_of(None, None, 0, -3, 2)
    b, h, q, k = one_of(1, B), one_of(1, H), one_of(1, Q), one_of(1, K)
    kinds = ["causal", "window", "dilated", "prefix", "global", "padding", "blocks", "keep"]
    match one_of(*kinds, *(["documents"] if Q <= K else [])):
        case "causal":
            return masks.causal(offset)
        case "window":
            return masks.window(one_of(*side), one_of(*side), offset=offset)
        case "dilated":
            return masks.dilated(size, offset=offset)
        case "prefix":
            return masks.prefix(one_of(0, 1, 4, 10))
        case "global":
            return masks.global_tokens(one_of([], [0], [7, 2]), offset=offset)
        case "padding":
            return masks.padding(torch.randint(0, K + 1, (b,), generator=chance))
        case "documents":
            return masks.documents(torch.randint(0, 3, (b, K), generator=chance))
        case "blocks":
            layout = torch.rand(b, h, -(-Q // size), -(-K // size), generator=chance) < 0.5
            return masks.blocks(layout, size)
        case _:
            return masks.keep(torch.rand(b, h, q, k, generator=chance) < 0.5)


def composed(draw: st.DrawFn, shape: Shape, depth: int = 3) -> Mask:
    """Masks combined with each other, up to `depth` operators deep."""
    operator = draw(st.sampled_from(["leaf", "&", "|", "~"])) if depth else "leaf"
    if operator == "leaf":
        return leaf(draw, shape)
    mask = composed(draw, shape, depth - 1)
    if operator == "~":
        return ~mask
    other = composed(draw, shape, depth - 1)
    return mask & other if operator == "&" else mask | other


@st.composite
def calls(draw: st.DrawFn, many: int = 1) -> Any:
    """The shape of a call and masks that fit it."""
    shape = draw(shapes())
    # The shape-checking hook looks at random items of lists, which strategies may not do.
    with patch.object(jaxtyping.config, "jaxtyping_disable", True):
        return (shape, *(composed(draw, shape) for _ in range(many)))


def seen(mask: Mask, shape: Shape) -> Tensor:
    """Every pair of the call, whatever the mask tells apart."""
    bound = mask.bind(shape, CPU)
    allowed = pairs(bound, torch.arange(shape.Q), torch.arange(shape.K))
    return allowed.expand(shape.B, shape.H, shape.Q, shape.K)


def same(one: Mask, other: Mask, shape: Shape) -> bool:
    return torch.equal(seen(one, shape), seen(other, shape))


@LAW
@given(calls(2))
def test_de_morgan(call):
    shape, a, b = call
    assert same(~(a & b), ~a | ~b, shape)
    assert same(~(a | b), ~a & ~b, shape)


@LAW
@given(calls())
def test_twice_not_is_nothing(call):
    shape, a = call
    assert same(~~a, a, shape)
    assert not (seen(a, shape) & seen(~a, shape)).any()
    assert (seen(a, shape) | seen(~a, shape)).all()


@LAW
@given(calls())
def test_a_mask_with_itself_is_itself(call):
    shape, a = call
    assert same(a & a, a, shape)
    assert same(a | a, a, shape)


@LAW
@given(calls(2))
def test_order_does_not_matter(call):
    shape, a, b = call
    assert same(a & b, b & a, shape)
    assert same(a | b, b | a, shape)


@LAW
@given(calls(3))
def test_grouping_does_not_matter(call):
    shape, a, b, c = call
    assert same((a & b) & c, a & (b & c), shape)
    assert same((a | b) | c, a | (b | c), shape)


@LAW
@given(calls(3))
def test_and_spreads_over_or(call):
    shape, a, b, c = call
    assert same(a & (b | c), (a & b) | (a & c), shape)


@LAW
@given(calls(2))
def test_combining_is_combining_tables(call):
    shape, a, b = call
    assert torch.equal(seen(a & b, shape), seen(a, shape) & seen(b, shape))
    assert torch.equal(seen(a | b, shape), seen(a, shape) | seen(b, shape))
    assert torch.equal(seen(~a, shape), ~seen(a, shape))


@LAW
@given(calls(), st.integers(1, 10))
def test_tiles_agree_with_dense(call, size):
    shape, mask = call
    dense, tiles = mask.dense(shape.Q, shape.K), mask.tiles(shape.Q, shape.K, size=size)
    for i, strip in enumerate(dense.split(size, -2) if shape.Q else []):
        for j, block in enumerate(strip.split(size, -1) if shape.K else []):
            state = block.all((-1, -2)).long() + block.any((-1, -2)).long()
            assert torch.equal(tiles[..., i, j].long(), state)


@LAW
@given(calls())
def test_count_agrees_with_dense(call):
    shape, mask = call
    if shape.Q or shape.K:
        assert mask.count(shape.Q, shape.K) == int(mask.dense(shape.Q, shape.K).sum())


@LAW
@given(calls(2))
def test_taken_apart_and_put_together(call):
    shape, a, b = call
    got = decode(*encode([a, None, b]))
    assert got == [a, None, b]
    assert repr(got) == repr([a, None, b])
    assert hash(got[0]) == hash(a)
    assert same(got[0], a, shape)


@LAW
@given(calls())
def test_bound_masks_can_be_taken_apart_too(call):
    shape, mask = call
    bound = mask.bind(shape, CPU)
    (again,) = decode(*encode([bound]))
    q, k = torch.arange(shape.Q), torch.arange(shape.K)
    assert torch.equal(pairs(again, q, k), pairs(bound, q, k))


@LAW
@given(calls(), shapes())
def test_binding_changes_nothing(call, other):
    """A mask is a value: what it was bound to before leaves no mark on it."""
    shape, mask = call
    text, dense = repr(mask), mask.dense(shape.Q, shape.K)
    with suppress(RegardError):
        mask.bind(other, CPU)
    bound = mask.bind(shape, CPU)
    assert repr(mask) == text
    assert torch.equal(mask.dense(shape.Q, shape.K), dense)
    assert (bound.batch, bound.heads) == (mask.batch, mask.heads)
    assert torch.equal(seen(mask, shape), dense.expand(shape.B, shape.H, shape.Q, shape.K))


@LAW
@given(calls(), st.data())
def test_a_part_of_a_mask_is_a_part_of_its_table(call, data):
    shape, mask = call
    b = torch.tensor(data.draw(st.lists(st.integers(0, shape.B - 1), min_size=1, max_size=3)))
    h = torch.tensor(data.draw(st.lists(st.integers(0, shape.H - 1), min_size=1, max_size=3)))
    part = mask.bind(shape, CPU).select(b, h)
    got = pairs(part, torch.arange(shape.Q), torch.arange(shape.K))
    assert torch.equal(got.expand(len(b), len(h), shape.Q, shape.K), seen(mask, shape)[b][:, h])


@LAW
@given(calls(), st.integers(1, 5), st.integers(1, 5))
def test_a_survey_misses_no_pair(call, q_size, k_size):
    shape, mask = call
    bound = mask.bind(shape, CPU)
    own = Shape(mask.batch, mask.heads, shape.Q, shape.K)
    found = survey(bound, own, q_size, k_size, CPU)
    assert found.pairs == int(mask.dense(shape.Q, shape.K).sum())
    assert found.pairs <= found.visited <= own.B * own.H * own.Q * own.K
