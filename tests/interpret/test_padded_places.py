"""Places of texts that are padded: those from the end are a text's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from regard import RegardError, interpret
from regard.interpret import metrics

SIDES = ("left", "right")


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def texts(side: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Two texts by themselves, and both as one batch that is padded."""
    random = torch.Generator().manual_seed(1)
    alone = []
    for n in (5, 9):
        ids = torch.randint(3, 32, (1, n), generator=random)
        where = torch.arange(n)[None]
        alone.append(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": where}
        )
    none = torch.zeros(1, 4, dtype=torch.long)
    batch = {}
    for name in alone[0]:
        short = [none, alone[0][name]] if side == "left" else [alone[0][name], none]
        batch[name] = torch.cat([torch.cat(short, 1), alone[1][name]])
    return alone, batch


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("at", [-1, -4])
def test_metrics_read_the_end_of_each_text(side: str, at: int) -> None:
    llama, (alone, batch) = model(), texts(side)
    for metric in (
        metrics.logit_difference(4, 5, at=at), metrics.probability(4, at=at),
        metrics.log_odds(torch.tensor(4), at=at), metrics.kl(at=at),
    ):  # fmt: skip
        found = interpret.ablate(llama, batch, metric)
        want = [interpret.ablate(llama, text, metric) for text in alone]
        for row, *each in zip(found, *want, strict=True):
            assert row.changed == pytest.approx(sum(one.changed for one in each) / 2, abs=1e-6)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("at", [-1, -4])
def test_direct_logits_are_those_of_each_text_by_itself(side: str, at: int) -> None:
    llama, (alone, batch) = model(), texts(side)
    found = interpret.direct_logits(llama, batch, 7, at=at)
    want = [interpret.direct_logits(llama, text, 7, at=at) for text in alone]
    assert found.logit.tolist() == pytest.approx([float(one.logit) for one in want])
    for part, *each in zip(found.parts, *(one.parts for one in want), strict=True):
        assert part.values.tolist() == pytest.approx([float(one.values) for one in each], abs=1e-6)


def test_direct_logits_of_a_model_that_gives_its_last_logits_alone() -> None:
    llama, (_, batch) = model(), texts("left")
    kept = interpret.direct_logits(llama, batch | {"logits_to_keep": 1}, 7)
    assert kept.logit.tolist() == interpret.direct_logits(llama, batch, 7).logit.tolist()


def test_attribution_asks_about_the_end_of_each_text() -> None:
    llama, (alone, batch) = model(), texts("right")
    found, want = (
        interpret.attribute(llama, text, method="gradients", metric=metrics.probability(4))
        for text in (batch, alone[0])
    )
    assert found.tokens[0, :5].tolist() == pytest.approx(want.tokens[0].tolist())


@pytest.mark.parametrize(("side", "at"), [("left", 0), ("right", 8), ("right", -6), ("left", -6)])
def test_a_place_that_is_padding_is_refused(side: str, at: int) -> None:
    llama, (_, batch) = model(), texts(side)
    with pytest.raises(RegardError, match=r"padding in one of the texts[\s\S]*text 0 .* 5 tokens"):
        interpret.ablate(llama, batch, metrics.probability(4, at=at))
    with pytest.raises(RegardError, match="padding in one of the texts"):
        interpret.direct_logits(llama, batch, at=at)


@pytest.mark.parametrize("at", [9, -10, True])
def test_a_place_is_one_of_the_text(at: Any) -> None:
    llama, (alone, _) = model(), texts("left")
    with pytest.raises(RegardError, match=r"at= is a place[\s\S]*-9 to 8"):
        interpret.ablate(llama, alone[1], metrics.probability(4, at=at))
    with pytest.raises(RegardError, match=r"at= is a place[\s\S]*-9 to 8"):
        interpret.direct_logits(llama, alone[1], at=at)


@pytest.mark.parametrize("place", [-1, [0, -2], slice(-3, None), range(-2, 0)])
def test_edges_and_patches_from_an_end_that_is_padding_are_refused(place: Any) -> None:
    llama, (_, batch) = model(), texts("right")
    with pytest.raises(RegardError, match=r"places from the end[\s\S]*pad on the left"):
        interpret.knock_out(llama, batch, metrics.kl(), (place, 0))
    with pytest.raises(RegardError, match="places from the end"):
        interpret.knock_out(llama, batch, metrics.kl(), [[(1, 0), (2, place)]])
    with pytest.raises(RegardError, match="places from the end"):
        interpret.patch(llama, batch, batch, metrics.kl(), places=place)
    _, left = texts("left")
    assert len(interpret.knock_out(llama, left, metrics.kl(), (place, 5))) == 1
    assert len(interpret.knock_out(llama, batch, metrics.kl(), (slice(1, 4), 0))) == 1
