"""Caches that let keys go: tokens, logits and what is held, against all pairs in plain tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, caches
from regard.caches import HeavyHitters, PerHead, WindowVotes
from regard.caches.budgets import shared
from tests.traces.test_traces import largest

transformers = pytest.importorskip("transformers")

from tests.caches import eager  # noqa: E402

POLICIES: dict[str, Any] = {
    "heavy hitters": HeavyHitters(9, recent=3),
    "only heavy": HeavyHitters(6, recent=0),
    "only recent": HeavyHitters(5, recent=5),
    "window votes": WindowVotes(11, window=5, width=3),
    "mean votes": WindowVotes(11, window=4, width=1, pool="mean"),
    "shared heavy hitters": PerHead(HeavyHitters(9, recent=2)),
    "shared votes": PerHead(WindowVotes(10, window=4, width=3), floor=0.5),
    "shared without floor": PerHead(HeavyHitters(7, recent=0), floor=0.0),
}


def build(kind: str = "llama", implementation: str = "regard", **sizes: Any) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=61,
            n_embd=24,
            n_layer=2,
            n_head=3,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=None,
        )
        model = transformers.GPT2LMHeadModel
    else:
        config = transformers.LlamaConfig(
            vocab_size=61, hidden_size=48, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=6, num_key_value_heads=3, head_dim=8, **sizes,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM
    config.eos_token_id = None
    made = model._from_config(config, attn_implementation=implementation).eval().double()
    for weight in made.parameters():
        weight.data.mul_(3)  # heads that look at something
    return made


def text(n: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(1, 61, (1, n), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, given: Tensor, cache: Any, many: int = 8, **how: Any) -> Any:
    return model.generate(
        given, past_key_values=cache, max_new_tokens=many, do_sample=False, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True, **how,
    )  # fmt: skip


def held(cache: Any, layer: int, entry: int = 0) -> list[list[int]]:
    heads = cache.positions(layer)[entry].tolist()
    for head in heads:  # what is held stands at the end
        assert head == sorted(head)
    return [[at for at in head if at >= 0] for head in heads]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("name", POLICIES)
def test_what_is_kept_and_said_is_that_of_all_pairs(name: str, kind: str) -> None:
    model, cache = build(kind), caches.EvictingCache(build(kind), POLICIES[name])
    tokens, logits, kept = eager.generate(
        build(kind, "by_the_book"), text(), POLICIES[name], 8, G=3
    )
    found = generate(model, text(), cache)
    assert found.sequences.tolist() == tokens.tolist()
    torch.testing.assert_close(torch.stack(found.logits, 1), logits.float())
    # The token that was chosen last was never read.
    assert [held(cache, layer) for layer in range(2)] == kept
    if name.startswith("shared"):
        assert len({len(head) for layer in kept for head in layer}) > 1
    assert cache.get_seq_length() == 31


def test_a_budget_that_is_never_reached_changes_nothing() -> None:
    model = build().float()
    want = generate(model, text(), None)
    for policy in (HeavyHitters(32, recent=4), PerHead(WindowVotes(40))):
        got = generate(model, text(), caches.EvictingCache(model, policy))
        assert got.sequences.tolist() == want.sequences.tolist()
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits))


@pytest.mark.parametrize("name", ["heavy hitters", "window votes", "shared heavy hitters"])
def test_texts_padded_on_the_left_are_each_as_if_alone(name: str) -> None:
    model = build()
    texts = [text(24), text(17, seed=1), text(9, seed=2)]
    given = torch.cat([torch.nn.functional.pad(t, (24 - t.shape[1], 0)) for t in texts])
    real = torch.arange(24) >= torch.tensor([[24 - t.shape[1]] for t in texts])
    cache = caches.EvictingCache(model, POLICIES[name])
    found = generate(model, given, cache, attention_mask=real.long())
    for i, one in enumerate(texts):
        alone = caches.EvictingCache(model, POLICIES[name])
        want = generate(model, one, alone)
        missing = 24 - one.shape[1]
        assert found.sequences[i, missing:].tolist() == want.sequences[0].tolist()
        for layer in range(2):
            moved = [[at + missing for at in head] for head in held(alone, layer)]
            assert held(cache, layer, i) == moved


def test_a_slot_that_holds_nothing_is_never_seen() -> None:
    model, answers = build(), []
    for poison in (False, True):
        cache = caches.EvictingCache(model, POLICIES["shared heavy hitters"])
        with torch.no_grad():
            model(text(), past_key_values=cache)
            for layer in cache.layers:
                empty = ~layer.slots.filled
                assert empty.any()
                if poison:
                    layer.keys[empty], layer.values[empty] = torch.nan, torch.nan
            answers.append(model(text(3, seed=5), past_key_values=cache).logits)
    assert torch.equal(*answers)


def test_a_text_may_come_in_parts_and_beams_may_part() -> None:
    model = build()
    whole = caches.EvictingCache(model, HeavyHitters(40, recent=4))
    parts = caches.EvictingCache(model, HeavyHitters(40, recent=4))
    with torch.no_grad():
        want = model(text(), past_key_values=whole).logits[:, -1]
        for part in text().split(7, 1):
            got = model(part, past_key_values=parts).logits[:, -1]
    torch.testing.assert_close(got, want)
    for a, b in zip(whole.layers, parts.layers, strict=True):
        torch.testing.assert_close(a.slots.scores, b.slots.scores)
    cache = caches.EvictingCache(model, HeavyHitters(9, recent=3))
    found = generate(model, text(), cache, num_beams=3, output_scores=True)
    best, again = found.sequences, caches.EvictingCache(model, HeavyHitters(9, recent=3))
    with torch.no_grad():  # the beam that won, read token by token
        said = model(text(), past_key_values=again).logits[0, -1].log_softmax(-1)
        score = said[best[0, 24]]
        for i in range(24, 31):
            said = model(best[:, i : i + 1], past_key_values=again).logits[0, -1].log_softmax(-1)
            score = score + said[best[0, i + 1]]
    torch.testing.assert_close(found.sequences_scores[0], score.float() / 8)


def test_layers_with_a_window_keep_their_own_cache() -> None:
    config = transformers.Gemma3TextConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=3, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=6, eos_token_id=None,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    model = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation="regard")
    cache = caches.EvictingCache(model.eval(), HeavyHitters(32, recent=4))
    got, want = generate(model, text(), cache), generate(model, text(), None)
    assert got.sequences.tolist() == want.sequences.tolist()
    small = caches.EvictingCache(model, HeavyHitters(9, recent=4))
    generate(model, text(), small)
    assert small.positions(1).shape == (1, 2, 9)
    assert small.nbytes() < cache.nbytes()
    with pytest.raises(RegardError, match=r"layer 0: DynamicSlidingWindowLayer"):
        small.positions(0)


def test_a_long_text_costs_no_matrix() -> None:
    model, n = build(max_position_embeddings=4096).float(), 1024
    for policy in (HeavyHitters(64, recent=8), PerHead(WindowVotes(64, window=8))):
        cache = caches.EvictingCache(model, policy)

        def read(cache: Any = cache) -> None:
            with torch.no_grad():
                model(text(n), past_key_values=cache, logits_to_keep=1)

        assert largest(read) < n * n * 4 / 2  # one head's matrix has twice as much


def test_watching_sees_the_calls_over_what_is_held() -> None:
    model = build()
    cache = caches.EvictingCache(model, HeavyHitters(9, recent=3))
    with regard.watch(model, keep="traces") as seen:
        found = generate(model, text(), cache)
    alone = generate(model, text(), caches.EvictingCache(model, HeavyHitters(9, recent=3)))
    assert found.sequences.tolist() == alone.sequences.tolist()
    keys = [t.inputs.shape.K for t in seen["model.layers.1.self_attn"].traces]
    assert keys == [24] + [10] * 7


def right_padded() -> None:
    model = build()
    real = torch.arange(24)[None] < 20
    model(text(), attention_mask=real, past_key_values=cache_for(model))


def cache_for(model: Any) -> Any:
    return caches.EvictingCache(model, HeavyHitters(9, recent=3))


def not_by_regard() -> None:
    model = build(implementation="sdpa")
    generate(model, text(), cache_for(model))


def cropped() -> None:
    model = build()
    cache = cache_for(model)
    model(text(), past_key_values=cache)
    cache.crop(-2)


WRONG = {
    "right padding": (right_padded, "a text is padded on the right"),
    "another implementation": (not_by_regard, r'(?s)was not told.*attn_implementation="regard"'),
    "going back": (cropped, r"cannot be cropped\n.*crop\(-2\)"),
    "no policy": (lambda: caches.EvictingCache(build(), None), r"policy= is the rule.*\n.*None"),  # type: ignore[arg-type]
    "a policy that was not made": (
        lambda: caches.EvictingCache(build(), HeavyHitters),  # type: ignore[arg-type]
        "policy= is the rule",
    ),
    "recent over budget": (lambda: HeavyHitters(4, recent=5), r"budget=4, recent=5"),
    "an even width": (lambda: WindowVotes(64, width=4), "an odd width"),
    "a broken width": (lambda: WindowVotes(64, width=3.0), "whole number"),  # type: ignore[arg-type]
    "a share in words": (lambda: PerHead(WindowVotes(64), floor="a"), "0 to 1"),  # type: ignore[arg-type]
    "an unknown pool": (lambda: WindowVotes(64, pool="sum"), "unknown pool"),  # type: ignore[arg-type]
    "a share above 1": (lambda: PerHead(WindowVotes(64), floor=1.5), "0 to 1"),
    "twice shared": (lambda: PerHead(PerHead(WindowVotes(64))), "another policy"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_done_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, match = WRONG[kind]
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(RegardError, match=match):
        ask()  # type: ignore[no-untyped-call]


def test_every_head_keeps_its_share_of_the_budget() -> None:
    scores = torch.stack([torch.ones(200), torch.zeros(200)])[None]
    for floor, least in ((0.29, 29), (0.57, 57), (0.58, 58), (0.2, 20)):
        kept = shared(scores, torch.ones(1, 2, 200, dtype=torch.bool), 100, 0, floor)
        assert kept.sum(-1).tolist() == [[200 - least, least]]
