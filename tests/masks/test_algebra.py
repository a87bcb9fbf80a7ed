"""Every mask against a rule written by hand; how masks combine, print, compare and refuse."""

from __future__ import annotations

import pytest
import torch

from regard import RegardError, biases, masks, scores
from regard.masks.algebra import pairs
from regard.values import Shape

SIZES = [(1, 1), (5, 5), (7, 7), (3, 8), (1, 6), (8, 3), (9, 4), (0, 4), (4, 0), (0, 0)]

# A mask, where its query 0 stands (None: at the end), and the rule it stands for.
ANYWHERE = {
    "causal": (masks.causal(), None, lambda x: x.j <= x.p),
    "causal-start": (masks.causal(offset=0), 0, lambda x: x.j <= x.i),
    "causal-later": (masks.causal(offset=2), 2, lambda x: x.j <= x.i + 2),
    "causal-before": (masks.causal(offset=-2), -2, lambda x: x.j <= x.i - 2),
    "window": (masks.window(2), None, lambda x: x.p - 2 <= x.j <= x.p),
    "window-two-sided": (masks.window(1, 3), None, lambda x: x.p - 1 <= x.j <= x.p + 3),
    "window-itself": (masks.window(0), None, lambda x: x.j == x.p),
    "window-right-open": (masks.window(1, None), None, lambda x: x.j >= x.p - 1),
    "window-left-open": (masks.window(None, 1), None, lambda x: x.j <= x.p + 1),
    "window-open": (masks.window(None, None), None, lambda x: True),
    "window-start": (masks.window(2, 1, offset=0), 0, lambda x: x.i - 2 <= x.j <= x.i + 1),
    "prefix": (masks.prefix(2), None, lambda x: x.j < 2),
    "prefix-none": (masks.prefix(0), None, lambda x: False),
    "dilated": (masks.dilated(3), None, lambda x: (x.j - x.p) % 3 == 0),
    "dilated-one": (masks.dilated(1), None, lambda x: True),
    "dilated-start": (masks.dilated(2, offset=0), 0, lambda x: (x.j - x.i) % 2 == 0),
    "global": (masks.global_tokens([0, 3]), None, lambda x: x.p in (0, 3) or x.j in (0, 3)),
    "global-none": (masks.global_tokens([]), None, lambda x: False),
    "global-start": (
        masks.global_tokens([1], offset=0), 0, lambda x: x.i == 1 or x.j == 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ANYWHERE)
def test_dense_is_the_rule(name, size, by_hand):
    mask, offset, rule = ANYWHERE[name]
    assert torch.equal(mask.dense(*size), by_hand(rule, 1, 1, *size, offset=offset))


def test_dense_is_square_unless_told_otherwise():
    assert masks.causal().dense(5).shape == (1, 1, 5, 5)


def test_the_last_query_stands_at_the_last_key():
    assert masks.causal().dense(1, 6).all()
    assert masks.causal(offset=0).dense(1, 6)[0, 0, 0].tolist() == [True] + 5 * [False]


@pytest.mark.parametrize("lengths", [[3, 0, 5], torch.tensor([3, 0, 5], dtype=torch.int32)])
@pytest.mark.parametrize("make", [masks.padding, lambda n: masks.prefix(torch.as_tensor(n))])
def test_lengths_differ_between_batch_entries(make, lengths, by_hand):
    mask = make(lengths)
    assert (mask.batch, mask.heads) == (3, 1)
    assert torch.equal(mask.dense(4, 5), by_hand(lambda x: x.j < [3, 0, 5][x.b], 3, 1, 4, 5))


@pytest.mark.parametrize(("Q", "offset"), [(7, None), (3, None), (3, 0), (2, 4), (0, None)])
def test_documents(Q, offset, by_hand):
    ids = [4, 4, 9, 9, 9, 4, 1]
    mask = masks.documents(ids, offset=offset)
    assert torch.equal(
        mask.dense(Q, 7), by_hand(lambda x: ids[x.p] == ids[x.j], 1, 1, Q, 7, offset=offset)
    )


def test_documents_differ_between_batch_entries(by_hand):
    ids = [[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]]
    mask = masks.documents(torch.tensor(ids))
    assert mask.batch == 2
    rule = lambda x: ids[x.b][x.p] == ids[x.b][x.j]  # noqa: E731
    assert torch.equal(mask.dense(3, 5), by_hand(rule, 2, 1, 3, 5))


@pytest.mark.parametrize(("Q", "K"), [(7, 7), (7, 5), (5, 9), (6, 6)])
def test_blocks(Q, K, by_hand):
    rows, columns = -(-Q // 3), -(-K // 3)
    layout = torch.rand(2, 3, rows, columns, generator=torch.Generator().manual_seed(0)) < 0.5
    rule = lambda x: bool(layout[x.b, x.h, x.i // 3, x.j // 3])  # noqa: E731
    mask = masks.blocks(layout, 3)
    assert (mask.batch, mask.heads) == (2, 3)
    assert torch.equal(mask.dense(Q, K), by_hand(rule, 2, 3, Q, K))
    same = masks.blocks(layout[0, 0], 3).dense(Q, K)
    assert torch.equal(same, mask.dense(Q, K)[:1, :1])


@pytest.mark.parametrize("axes", [(2, 3, 5, 7), (2, 1, 5, 7), (1, 3, 1, 7), (2, 3, 5, 1)])
def test_keep_and_ignore(axes, by_hand):
    table = torch.rand(axes, generator=torch.Generator().manual_seed(1)) < 0.5
    wide = table.expand(axes[0], axes[1], 5, 7)
    rule = lambda x: bool(wide[x.b, x.h, x.i, x.j])  # noqa: E731
    dense = by_hand(rule, axes[0], axes[1], 5, 7)
    assert torch.equal(masks.keep(table).dense(5, 7), dense)
    assert torch.equal(masks.ignore(table).dense(5, 7), ~dense)


def test_keep_takes_keys_alone_and_rows_of_queries():
    row = torch.tensor([True, False, True])
    assert masks.keep(row).dense(2, 3)[0, 0].tolist() == [[True, False, True]] * 2
    table = torch.tensor([[True, False, True], [False, False, True]])
    assert torch.equal(masks.keep(table).dense(2, 3)[0, 0], table)


def test_a_two_axis_keep_is_read_by_the_batch_where_only_that_fits():
    table = torch.tensor([[True, False, True], [False, False, True]])
    bound = masks.keep(table).bind(Shape(2, 1, 5, 3), torch.device("cpu"))
    seen = pairs(bound, torch.arange(5), torch.arange(3))
    assert torch.equal(seen, table[:, None, None, :].expand(2, 1, 5, 3))


def test_and_or_not(by_hand):
    a, b = masks.causal(), masks.dilated(2)
    seen_a, seen_b = a.dense(5, 6), b.dense(5, 6)
    assert torch.equal((a & b).dense(5, 6), seen_a & seen_b)
    assert torch.equal((a | b).dense(5, 6), seen_a | seen_b)
    assert torch.equal((~a).dense(5, 6), ~seen_a)


@pytest.mark.parametrize("name", ANYWHERE)
def test_what_masks_nothing_is_left_out_of_a_pair(name):
    """Whichever stands first; what is left is the same mask."""
    other, mask = masks.dilated(2), ANYWHERE[name][0]
    for size in SIZES:
        seen, rest = mask.dense(*size), other.dense(*size)
        for both in (mask & other, other & mask):
            assert torch.equal(both.dense(*size).expand_as(rest), seen & rest)
            bound = both.bind(Shape(1, 1, *size), torch.device("cpu"))
            told = mask.bind(Shape(1, 1, *size), torch.device("cpu")).band() is not None
            if told and min(size) > 0:
                assert (type(bound) is type(other)) == bool(seen.all())


def test_combinations_spread_over_batch_and_heads():
    lengths, layout = [2, 4], torch.tensor([[[[True]], [[False]], [[True]]]])
    mask = masks.padding(lengths) & masks.blocks(layout, 4) & masks.causal()
    assert (mask.batch, mask.heads) == (2, 3)
    dense = mask.dense(4)
    assert dense.shape == (2, 3, 4, 4)
    assert not dense[:, 1].any()
    assert torch.equal(
        dense[0, 0], torch.ones(4, 4, dtype=torch.bool).tril() & (torch.arange(4) < 2)
    )


@pytest.mark.parametrize("batch", [slice(1, 3), torch.tensor([2, 0])], ids=["slice", "index"])
@pytest.mark.parametrize("heads", [slice(0, 1), torch.tensor([1, 0, 1])], ids=["slice", "index"])
def test_select_takes_batch_entries_and_heads(batch, heads):
    draw = torch.Generator().manual_seed(2)
    table = torch.rand(3, 2, 4, 5, generator=draw) < 0.5
    layout = torch.rand(3, 2, 2, 3, generator=draw) < 0.5
    ids = torch.randint(0, 3, (3, 5), generator=draw)
    mask = ~(masks.keep(table) & masks.padding([5, 1, 3])) | (
        masks.blocks(layout, 2) & masks.documents(ids) & (masks.causal() | masks.global_tokens([2]))
    )
    bound = mask.bind(Shape(3, 2, 4, 5), torch.device("cpu"))
    part = pairs(bound.select(batch, heads), torch.arange(4), torch.arange(5))
    assert torch.equal(part, mask.dense(4, 5)[batch][:, heads])


PRINTS_AS_ITSELF = [
    "causal()",
    "causal(offset=0)",
    "causal(offset=-3)",
    "window(4)",
    "window(0)",
    "window(2, 3)",
    "window(None)",
    "window(2, None)",
    "window(3, offset=2)",
    "window(3, 1, offset=0)",
    "prefix(3)",
    "padding([3, 5])",
    "documents([0, 0, 1])",
    "dilated(2)",
    "global_tokens([0, 7])",
    "causal() & window(4)",
    "causal() | prefix(2) | dilated(3)",
    "causal() & (window(4) | prefix(2))",
    "(causal() & window(4)) | prefix(2)",
    "~causal()",
    "~(causal() & window(4))",
    "~~causal()",
    "~causal() & ~(window(1) | prefix(1))",
]


@pytest.mark.parametrize("text", PRINTS_AS_ITSELF)
def test_a_mask_prints_as_the_call_that_makes_it(text):
    mask = eval(text, vars(masks).copy())
    assert repr(mask) == text
    assert eval(repr(mask), vars(masks).copy()) == mask


def test_long_tensors_print_as_their_type_and_axes():
    assert repr(masks.padding(torch.arange(9))) == "padding(<int64 [9]>)"
    assert repr(masks.ignore(torch.ones(3, 3, dtype=torch.bool))) == "~keep(<bool [3, 3]>)"


def test_masks_are_equal_by_content():
    def make():
        table = torch.tensor([[True, False], [True, True]])
        return masks.causal() & (masks.keep(table) | ~masks.padding([1, 2])) & masks.window(3, 1)

    one, other = make(), make()
    assert one is not other
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1


@pytest.mark.parametrize(
    "other",
    [
        masks.causal(),
        masks.window(2),
        masks.window(3, 1),
        masks.window(3, offset=0),
        ~masks.window(3),
        masks.window(3) & masks.causal(),
        masks.prefix(3),
        3,
        None,
    ],
    ids=repr,
)
def test_masks_that_differ_are_not_equal(other):
    assert masks.window(3) != other


def test_tensors_inside_are_compared():
    assert masks.padding([1, 2]) == masks.padding(torch.tensor([1, 2]))
    assert masks.padding([1, 2]) != masks.padding([1, 3])
    assert masks.padding([1, 2]) != masks.padding([1, 2, 2])
    assert masks.padding([1, 2]) != masks.prefix(torch.tensor([1, 2]))
    assert masks.causal() & masks.dilated(2) != masks.dilated(2) & masks.causal()


def test_masks_cannot_be_changed():
    with pytest.raises(AttributeError):
        masks.window(3).left = 4


def test_to_moves_every_tensor():
    table = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    mask = masks.padding([1, 2]) & ~(masks.keep(table) | masks.documents([0, 0, 1]))
    moved = mask.to("meta")
    assert [t.device.type for t in moved.tensors()] == ["meta"] * 3
    assert [t.device.type for t in mask.tensors()] == ["cpu"] * 3
    assert moved.to("meta").batch == 2
    assert masks.causal().to("meta") == masks.causal()


def test_python_words_do_not_combine_masks():
    a, b = masks.causal(), masks.window(2)
    for use in (lambda: a and b, lambda: a or b, lambda: not a, lambda: 1 if a else 2):
        with pytest.raises(RegardError, match="a mask has no truth value") as error:
            use()
        assert "`and`, `or`, `not` or `if` with causal()" in str(error.value)
        assert "combine masks with &, | and ~" in str(error.value)


@pytest.mark.usefixtures("without_hook")
@pytest.mark.parametrize("sign", ["&", "|"])
def test_a_tensor_is_not_a_mask(sign):
    table = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(RegardError) as error:
        masks.causal() & table if sign == "&" else masks.causal() | table
    text = str(error.value)
    assert text.startswith(f"{sign} combines masks with masks")
    assert "got:      Tensor" in text
    assert "masks.keep(t) (True is attended to) or masks.ignore(t)" in text


@pytest.mark.usefixtures("without_hook")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: masks.window(-1), ["left counts keys besides the query itself", "left=-1"]),
        (lambda: masks.window(2, -3), ["right counts keys", "right=-3", "None for no limit"]),
        (lambda: masks.prefix(-1), ["prefix takes a count of keys", "-1", "0 or more"]),
        (lambda: masks.dilated(0), ["a step between keys", "1 or more"]),
        (lambda: masks.padding([0.5]), ["one whole number per batch entry", "float32"]),
        (lambda: masks.padding([3, -1]), ["padding takes counts of keys", "-1", "0 or more"]),
        (lambda: masks.prefix(torch.tensor([-2])), ["prefix takes counts of keys", "-2"]),
        (lambda: masks.padding(["a"]), ["one whole number per batch entry", "['a']"]),
        (lambda: masks.padding("ab"), ["one whole number per batch entry", "'ab'"]),
        (lambda: masks.padding([[1], [2, 3]]), ["one whole number per batch entry"]),
        (lambda: masks.padding([2**70]), ["one whole number per batch entry"]),
        (lambda: masks.padding(None), ["one whole number per batch entry", "None"]),
        (lambda: masks.padding(torch.ones(2, dtype=torch.complex64)), ["complex64"]),
        (lambda: masks.prefix("3"), ["prefix takes", "'3'"]),
        (lambda: masks.prefix(True), ["prefix must be a whole number", "True (bool)"]),
        (lambda: masks.window(True), ["left must be a whole number", "True (bool)"]),
        (lambda: masks.documents(["a", "b"]), ["ids are whole numbers", "['a', 'b']"]),
        (lambda: masks.documents(torch.ones(3).bool()), ["ids are whole numbers", "torch.bool"]),
        (lambda: masks.documents(7), ["ids are whole numbers", "7"]),
        (lambda: masks.documents([0, 1], offset=0.5), ["documents: offset", "whole number"]),
        (lambda: masks.global_tokens("ab"), ["takes positions", "'ab'"]),
        (lambda: masks.global_tokens(2), ["takes positions", "2"]),
        (lambda: masks.global_tokens([0], offset="1"), ["global_tokens: offset", "whole number"]),
        (lambda: masks.dilated(2, offset=0.5), ["dilated: offset", "whole number"]),
        (lambda: masks.window(2, offset=0.5), ["window: offset", "whole number"]),
        (lambda: masks.blocks([[True]], 4), ["layout of booleans", "list"]),
        (
            lambda: masks.padding(torch.ones(2, 3, dtype=torch.bool)),
            ["torch.bool [2, 3]", "masks.keep(t) or masks.ignore(t)"],
        ),
        (lambda: masks.prefix(torch.tensor([[1]])), ["prefix takes", "an integer tensor [B]"]),
        (lambda: masks.documents([0.0, 1.0]), ["whole numbers", "torch.float32 [0.0, 1.0]"]),
        (lambda: masks.documents(torch.zeros(1, 1, 2, dtype=torch.long)), ["[K] or [B, K]"]),
        (lambda: masks.global_tokens(torch.tensor([0.5])), ["takes positions", "float32"]),
        (lambda: masks.global_tokens(torch.tensor([True])), ["positions", "bool [True]"]),
        (lambda: masks.global_tokens(torch.ones(1, 2, device="meta")), ["positions", "[1, 2]"]),
        (lambda: masks.blocks(torch.ones(2, 2), 4), ["layout of booleans", "torch.float32"]),
        (lambda: masks.blocks(torch.ones(2, 2, 2).bool(), 4), ["[2, 2, 2]", "[B, H, query blocks"]),
        (lambda: masks.blocks(torch.ones(2, 2).bool(), 0), ["size counts tokens", "1 or more"]),
        (
            lambda: masks.keep(torch.ones(2, 2)),
            ["holds booleans", "torch.float32", "regard.biases.dense(t)", "t.bool()"],
        ),
        (lambda: masks.ignore(torch.ones(2, 2, dtype=torch.long)), ["booleans", "torch.int64"]),
        (
            lambda: masks.keep(torch.ones(2, 3, 3).bool()).dense(3),
            ["several things", "[2, 3, 3]", "[B, Q, K] is t[:, None]", "[H, Q, K] is t[None]"],
        ),
        (lambda: masks.keep(torch.tensor(True)), ["could mean several things"]),
        (lambda: masks.keep(torch.ones(1, 1, 1, 2, 2).bool()).dense(2), ["several things"]),
        (lambda: masks.causal().dense(-1), ["a negative length", "queries=-1, keys=-1"]),
        (lambda: masks.causal().count(3, -2), ["a negative length", "queries=3, keys=-2"]),
    ],
)  # fmt: skip
def test_what_a_mask_refuses_when_made(make, words):
    with pytest.raises(RegardError) as error:
        make()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("mask", "shape", "words"),
    [
        (
            masks.keep(torch.ones(4, 6).bool()), (4, 2, 4, 6),
            ["could mean two things", "[4, 6], which is [Q, K] and also [B, K]",
             "t[None, None] if its rows are queries",
             "t[:, None, None, :] if they are batch entries"],
        ),
        (
            masks.keep(torch.ones(5, 6).bool()), (4, 2, 3, 6),
            ["fits neither queries nor batch", "[5, 6]", "[Q, K] = [3, 6] or [B, K] = [4, 6]"],
        ),
        (
            masks.keep(torch.ones(2, 1, 3, 6).bool()), (4, 2, 3, 6),
            ["does not fit the call", "[2, 1, 3, 6] for [B, H, Q, K] = [4, 2, 3, 6]"],
        ),
        (
            masks.padding([3, 4]), (3, 1, 5, 5),
            ["padding([3, 4]) is for another batch size", "2 lengths for a batch of 3"],
        ),
        (
            masks.padding([3, 7]), (2, 1, 5, 5),
            ["padding([3, 7]) counts more keys than there are", "a length of 7 for 5 keys",
             "0 to 5"],
        ),
        (
            masks.documents([0, 0, 1]), (1, 1, 4, 4),
            ["one id per key", "ids [3] for batch 1 and 4 keys", "[4] or [1, 4]"],
        ),
        (
            masks.documents(torch.zeros(2, 4, dtype=torch.long)), (3, 1, 4, 4),
            ["one id per key", "ids [2, 4] for batch 3 and 4 keys"],
        ),
        (
            masks.documents([0, 0, 1]), (1, 1, 4, 3),
            ["every query must stand at a key", "4 queries from position -1, 3 keys", "masks.keep"],
        ),
        (
            masks.documents([0, 0, 1], offset=1), (1, 1, 3, 3),
            ["every query must stand at a key", "3 queries from position 1, 3 keys"],
        ),
        (
            masks.blocks(torch.ones(2, 2).bool(), 2), (1, 1, 5, 4),
            ["blocks of 2: the layout does not cover the call",
             "layout [1, 1, 2, 2] for [1, 1, 5, 4]", "[1 or 1, 1 or 1, 3, 2]"],
        ),
        (
            masks.blocks(torch.ones(2, 1, 2, 2).bool(), 2), (3, 1, 4, 4),
            ["does not cover the call", "[3 or 1, 1 or 1, 2, 2]"],
        ),
    ],
)  # fmt: skip
def test_what_a_mask_refuses_when_used(mask, shape, words):
    with pytest.raises(RegardError) as error:
        mask.bind(Shape(*shape), torch.device("cpu"))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("mask", [masks.prefix(9), masks.global_tokens([0, 9])], ids=repr)
def test_places_past_the_keys_are_places_to_come(mask):
    """Unlike lengths, places hold for every call: those that are not there yet match nothing."""
    here = masks.prefix(4) if "prefix" in repr(mask) else masks.global_tokens([0])
    assert torch.equal(mask.dense(4), here.dense(4))


def test_masks_of_different_batches_do_not_combine():
    with pytest.raises(RegardError, match=r"padding\(\[1, 2, 3\]\) is for another batch size"):
        (masks.padding([1, 2]) & masks.padding([1, 2, 3])).dense(4)


@pytest.mark.parametrize(
    "text",
    [
        "dilated(2, offset=1)",
        "documents([0, 1], offset=0)",
        "global_tokens([1], offset=0)",
        "causal() & (window(1) & prefix(2))",
    ],
)
def test_masks_print_as_the_call(text):
    mask = eval(text, vars(masks).copy())
    assert eval(repr(mask), vars(masks).copy()) == mask


def test_scores_and_biases_print_as_the_call():
    assert repr(scores.distance(2.0, squared=False)) == "distance(2.0, squared=False)"
    assert repr(biases.alibi([1.0], offset=2)) == "alibi([1.0], offset=2)"
    assert (
        repr(biases.relative(torch.ones(1, 3), offset=2)) == "relative([[1.0, 1.0, 1.0]], offset=2)"
    )


@pytest.mark.usefixtures("without_hook")
@pytest.mark.parametrize("places", [[0.5], [True, False], [-1]], ids=str)
def test_global_tokens_are_places(places):
    with pytest.raises(RegardError, match="positions"):
        masks.global_tokens(places)


@pytest.mark.usefixtures("without_hook")
@pytest.mark.parametrize(
    "use",
    [
        lambda: masks.causal().tiles(4, size=0),
        lambda: masks.causal().draw(4, width=0),
        lambda: masks.window(1.5),
        lambda: masks.keep([True]),
        lambda: masks.from_multihead(key_padding_mask=torch.tensor([True, False])),
        lambda: biases.slopes(-1),
        lambda: torch.ones(2, 2).bool() & masks.causal(),
    ],
)
def test_refused_with_words(use):
    with pytest.raises(RegardError):
        use()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize(("Q", "K"), [(3, 3), (300, 100), (10, 270)], ids=str)
def test_positions_are_whole_numbers_of_any_size(dtype: torch.dtype, Q: int, K: int) -> None:
    places = [0, 2, 99]
    narrow = masks.global_tokens(torch.tensor(places, dtype=dtype))
    assert torch.equal(narrow.dense(Q, K), masks.global_tokens(places).dense(Q, K))
