"""Citations: the attention of an answer on passages, held to what eager attention hands out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, interpret
from regard.seen import Seen

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PASSAGES = [range(1, 5), range(5, 12), range(14, 16)]
PROMPT, ANSWER = 18, 5


def build(kind: str, **sizes: Any) -> Any:
    model_kind = getattr(transformers, kind)
    config = model_kind.config_class(**SIZES | sizes)
    model = model_kind._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("LlamaForCausalLM")


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(3, 64, (2, PROMPT), generator=torch.Generator().manual_seed(2))


def answer(model: Any, ids: Tensor, **how: Any) -> Any:
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False,
        eos_token_id=None, return_dict_in_generate=True, **how,
    )  # fmt: skip


def watched(model: Any, ids: Tensor, **how: Any) -> Seen:
    with regard.watch(model, keep="traces") as seen:
        answer(model, ids, **how)
    return seen


def by_hand(steps: Any, heads: list[tuple[int, int]], batch: int) -> Tensor:
    """[tokens, passages] from eager attention's own matrices: one row of each step predicts."""
    return torch.stack([
        torch.stack([
            torch.stack([step[l][batch, h, -1, p.start : p.stop].sum() for p in PASSAGES])
            for l, h in heads
        ]).mean(0)
        for step in steps
    ])  # fmt: skip


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("heads", [None, [(0, 3)], [(1, 0), (0, 2), (1, 3)]])
def test_shares_are_those_of_eager_attention(
    llama: Any, ids: Tensor, heads: list[tuple[int, int]] | None, batch: int
) -> None:
    steps = answer(llama, ids, output_attentions=True).attentions
    every = [(l, h) for l in range(2) for h in range(4)]
    want = by_hand(steps, heads or every, batch)
    got = interpret.citations(watched(llama, ids), PASSAGES, heads=heads, batch=batch)
    torch.testing.assert_close(got.shares, want, atol=2e-6, rtol=2e-5)
    assert (got.shares.sum(1) < 1).all()


def test_a_static_cache_gives_the_same(llama: Any, ids: Tensor) -> None:
    dynamic, static = (
        interpret.citations(watched(llama, ids, **how), PASSAGES).shares
        for how in ({}, {"cache_implementation": "static", "disable_compile": True})
    )
    torch.testing.assert_close(static, dynamic, atol=2e-6, rtol=2e-5)


def test_reading_prompt_and_answer_at_once_gives_the_same(llama: Any, ids: Tensor) -> None:
    want = interpret.citations(watched(llama, ids), PASSAGES).shares
    whole = answer(llama, ids).sequences
    with torch.no_grad(), regard.watch(llama, keep="traces") as seen:
        llama(whole)
    got = interpret.citations(seen, PASSAGES, prompt=PROMPT, tokens=ANSWER).shares
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)


def test_layers_can_be_chosen(llama: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(llama, ids)
    one = interpret.citations(seen, PASSAGES, layers="*.1.*")
    assert torch.equal(interpret.citations(seen, PASSAGES, layers=["*.1.*"]).shares, one.shares)
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(RegardError, match=r"pairs \(layer, head\)"):
        interpret.citations(seen, PASSAGES, heads=[1])  # type: ignore[list-item]
    same = interpret.citations(seen, PASSAGES, heads=[(1, h) for h in range(4)])
    assert torch.equal(one.shares, same.shares)


def test_cross_attention_cites_the_source() -> None:
    model = build(
        "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.arange(3, 21)[None]
    steps = answer(model, ids, output_attentions=True).cross_attentions
    want = by_hand(steps, [(l, h) for l in range(2) for h in range(4)], 0)
    seen = watched(model, ids)
    got = interpret.citations(seen, PASSAGES, layers="*.EncDecAttention").shares
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)
    with pytest.raises(RegardError, match=r"range\(0, 1\), which 'decoder.*\n.*one in layers="):
        interpret.citations(seen, PASSAGES)
    with pytest.raises(RegardError, match=r"(?s)not run over the same tokens.*1 rows.*and 5 rows"):
        interpret.citations(seen, PASSAGES, heads=[(0, 0), (3, 0)])


def test_the_strongest_passages_come_first() -> None:
    shares = torch.tensor([[0.1, 0.5, 0.2], [0.3, 0.1, 0.2]])
    found = interpret.Citations(shares)
    assert [[c.passage for c in token] for token in found.top(2)] == [[1, 2], [0, 2]]
    assert found.top(9)[0][0] == (1, 0.5)
    assert [c.passage for c in found.over(slice(0, 2))] == [1, 0, 2]
    assert [c.passage for c in found.over(range(1, 2))] == [0, 2, 1]
    assert found.over(range(0, 2))[0].share == pytest.approx(0.3)
    with pytest.raises(RegardError, match="a span needs a token"):
        found.over(slice(2, 2))


def test_a_span_has_the_steps_and_the_order_of_its_range() -> None:
    found = interpret.Citations(torch.tensor([[0.1, 0.2], [0.9, 0.0], [0.3, 0.4], [0.5, 0.0]]))
    for tokens in (slice(0, 4, 2), range(0, 4, 2), range(2, -1, -2)):
        shares = {c.passage: c.share for c in found.over(tokens)}
        assert shares == pytest.approx({0: 0.2, 1: 0.3})
    assert found.over(range(1, 99)) == found.over(slice(1, None))


def test_odd_spans_and_passages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Wrong types reach regard's own checks even when the shape-checking hook is on.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    found: Any = interpret.Citations(torch.tensor([[0.1, 0.2], [0.9, 0.0]]))
    for tokens in (1, range(-2, 0), [0, 1]):
        with pytest.raises(RegardError, match="a span is some tokens"):
            found.over(tokens)
    with pytest.raises(RegardError, match="top counts passages"):
        found.top(-1)
    with pytest.raises(RegardError, match="whole number"):
        found.top(1.5)
    seen = Seen()
    x = torch.randn(1, 1, 6, 4)
    seen.layer("self_attn").take(regard.trace(x, x, x), 0, keep=True)
    passages: Any
    for passages in ([(0, 2)], range(2)):
        with pytest.raises(RegardError, match=r"(?s)a passage is a range.*range\(40, 90\)"):
            interpret.citations(seen, passages, prompt=3)


@pytest.mark.parametrize("window", [8, PROMPT, PROMPT + 2])
def test_a_cache_that_lost_keys_is_refused(ids: Tensor, window: int) -> None:
    """Also one that is full after the prompt: it always has as many keys, but not the same."""
    model = build("MistralForCausalLM", sliding_window=window)
    with pytest.raises(RegardError, match=r"(?s)lost its first keys.*18 keys at first.*layers="):
        interpret.citations(watched(model, ids), PASSAGES)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "outside": ({"passages": [range(10, 19)]}, r"range\(10, 19\)\n.*within range\(0, 18\)"),
    "empty": ({"passages": [range(3, 3)]}, "at least one place"),
    "stepped": ({"passages": [range(3, 9, 2)]}, "a range of places"),
    "none": ({"passages": []}, "there must be a passage"),
    "tokens": ({"tokens": 6}, r"rows 17 to 22\n.*0 to 21"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_done_is_refused(llama: Any, ids: Tensor, kind: str) -> None:
    change, text = WRONG[kind]
    with pytest.raises(RegardError, match=text):
        interpret.citations(watched(llama, ids), **{"passages": PASSAGES} | change)


def test_beams_that_change_places_are_refused(llama: Any, ids: Tensor) -> None:
    seen = watched(llama, ids[:1], num_beams=4)
    with pytest.raises(RegardError, match=r"changed places[\s\S]*without beams"):
        interpret.citations(seen, PASSAGES)
