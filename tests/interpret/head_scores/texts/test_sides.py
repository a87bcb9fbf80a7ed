"""What is known of texts is asked of a device once, or not at all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import biases, masks
from regard.interpret.head_scores.pairs.asked_totals import _rows_by_offset
from regard.interpret.head_scores.pairs.pair_totals import REACH
from regard.interpret.head_scores.pairs.row_totals import row_totals
from regard.interpret.head_scores.texts.sides import Side
from regard.interpret.head_scores.texts.text_batches import Texts

IDS = torch.randint(40, (1, 9), generator=torch.Generator().manual_seed(1))


def test_no_device_is_asked_whether_texts_without_padding_have_some() -> None:
    # A tensor on "meta" has no numbers that could be asked for.
    ids = torch.zeros(1, 9, dtype=torch.long, device="meta")
    assert not Side.of_places(1, 9, ids.device).padded
    (batch,) = Texts(nn.Identity(), [ids, ids]).batches()
    assert not batch.sides[0].padded
    assert not Texts(nn.Identity(), [{"input_ids": ids}]).sides[0][0].padded


def test_the_tokens_of_texts_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []
    listed = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: (asked.append(self), listed(self))[1])
    texts = Texts(nn.Identity(), [IDS, IDS[:, :4], {"input_ids": IDS, "attention_mask": IDS > 9}])
    every = texts.counts()
    assert sum(every.values()) == 9 + 4 + int((IDS > 9).sum())
    assert texts.counts() == every
    assert len(asked) == 1


def test_layers_share_what_follows_from_their_mask_and_from_no_other() -> None:
    side, x = Side.of_tokens(IDS), torch.randn(1, 1, 9, 4)
    causal, window = masks.causal(), masks.window(2)
    found = [
        _rows_by_offset(regard.trace(x, x, x, mask=mask).inputs, side)
        for mask in (causal, causal, window, None)
    ]
    assert found[0] is found[1]
    for rows, (before, after) in zip(found[1:], ((8, 0), (2, 0), (8, 8)), strict=True):
        want = [
            9 - abs(offset) if -after <= offset <= before else 0
            for offset in range(-REACH, REACH + 1)
        ]
        assert rows[0].tolist() == want


def test_what_is_counted_of_a_text_goes_with_its_batch() -> None:
    texts = Texts(torch.nn.Identity(), [{"input_ids": torch.tensor([[3, 1, 1]])}])
    for batch in texts.batches():
        assert batch.sides[0].among(torch.tensor([1])).tolist() == [[False, True, True]]
    (side,) = texts.sides[0]
    assert not side._among


def test_what_a_table_of_biases_hides_is_of_its_layer_alone() -> None:
    x, side = torch.zeros(1, 1, 4, 2), Side.of_tokens(torch.arange(4)[None])
    sees_all, window = torch.zeros(4, 4), torch.full((4, 4), -torch.inf)
    for key in range(4):
        window[key : key + 2, key] = 0
    for table, most in ((sees_all, 4 * math.log(4)), (window, 3 * math.log(2))):
        trace = regard.trace(x, x, x, bias=biases.dense(table[None, None]))
        assert float(row_totals(trace, side).most) == pytest.approx(most)
