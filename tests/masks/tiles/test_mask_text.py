"""Masks as text."""

from __future__ import annotations

import torch

from regard import masks


def test_one_line_per_query_and_two_columns_per_key():
    lines = masks.causal().draw(3, 5).split("\n")
    assert lines == ["██████····", "████████··", "██████████"]


def test_sixteen_queries_unless_told_otherwise():
    lines = masks.causal().draw().split("\n")
    assert len(lines) == 16
    assert {len(line) for line in lines} == {32}
    assert lines[0] == "██" + 30 * "·"


def test_long_masks_are_drawn_by_tiles():
    assert masks.causal().draw(100, width=4) == "▒▒······\n██▒▒····\n████▒▒··\n██████▒▒"
    assert masks.causal().draw(4, width=4) == "██······\n████····\n██████··\n████████"


def test_width_holds_for_the_longer_side():
    lines = masks.prefix(8).draw(2, 33, width=8).split("\n")
    assert lines == ["██▒▒" + 10 * "·"]


def test_undecided_tiles_are_looked_into():
    nothing = masks.causal() & masks.documents([0] * 4 + [1] * 4) & ~masks.causal()
    assert nothing.draw(8, width=2) == "····\n····"
    everything = masks.documents([0] * 4 + [1] * 4) | ~masks.documents([0] * 4 + [1] * 4)
    assert everything.draw(8, width=2) == "████\n████"


def test_the_first_batch_entry_and_head_is_drawn():
    table = torch.tensor([[True, False], [False, True]])
    assert masks.keep(table[:, None, None]).draw(1, 2) == "██··"
    assert masks.padding([1, 2]).draw(1, 2) == "██··"


def test_nothing_to_draw():
    assert masks.causal().draw(0) == ""
    assert masks.causal().draw(2, 0) == "\n"
