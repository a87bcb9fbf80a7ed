"""Caches that let keys go, under masks and in models that ask for more: against transformers' own
cache where nothing goes, and against slots full of poison where something does."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import RegardError, caches
from regard.caches import HeavyHitters, PerHead
from tests.caches.test_evicting_cache import build, generate, text

transformers = pytest.importorskip("transformers")

LARGE = HeavyHitters(100, recent=4)
"""A budget that is never reached."""
N = 24


def later(model: Any, cache: Any, many: int, prompt: Any = None, more: Any = None) -> Tensor:
    """Logits of so many more tokens after a prompt, each with a mask."""
    with torch.no_grad():
        model(text(), past_key_values=cache, attention_mask=prompt)
        found: Tensor = model(text(many, 1), past_key_values=cache, attention_mask=more).logits
    return found


def hiding(Q: int) -> Tensor:
    """A 2-D mask that hides tokens in the midst of a text."""
    seen = torch.ones(1, N + Q, dtype=torch.int64)
    seen[0, 5:15] = 0
    return seen


def square(heads: int = 1) -> Tensor:
    return torch.ones(N, N, dtype=torch.bool).tril().expand(1, heads, N, N).clone()


def prompt_of_one_head() -> Tensor:
    seen = square(6)
    seen[:, 0, -1, 5] = False
    return seen


def some(*shape: int) -> Tensor:
    """A mask of each pair and head; every query sees the newest keys."""
    seen = torch.rand(*shape, generator=torch.Generator().manual_seed(0)) > 0.5
    seen[..., N:] = torch.ones(shape[2], shape[2], dtype=torch.bool).tril()
    return seen


MASKS: dict[str, dict[str, Any]] = {
    "one token, some hidden": {"many": 1, "more": hiding(1)},
    "three tokens, some hidden": {"many": 3, "more": hiding(3)},
    "three tokens that end with padding": {
        "many": 3, "more": torch.ones(1, N + 3).long().index_fill(1, torch.tensor([N + 1]), 0),
    },
    "pairs of each head": {"many": 3, "more": some(1, 6, 3, N + 3)},
    "numbers that are added": {"many": 2, "more": torch.randn(1, 1, 2, N + 2).double()},
    "a prompt of pairs": {"many": 1, "prompt": prompt_of_one_head()},
    "a prompt of pairs, all heads": {"many": 2, "prompt": prompt_of_one_head()[:, :1]},
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_followed_as_by_transformers_cache(name: str) -> None:
    model = build()
    want = later(model, transformers.DynamicCache(config=model.config), **MASKS[name])
    torch.testing.assert_close(
        later(model, caches.EvictingCache(model, LARGE), **MASKS[name]), want
    )


def test_a_model_that_sees_both_ways_does_so_later() -> None:
    model = build(is_causal=False)
    model.config.is_causal = False
    want = later(model, transformers.DynamicCache(config=model.config), 4)
    torch.testing.assert_close(later(model, caches.EvictingCache(model, LARGE), 4), want)


@pytest.mark.parametrize("dense", [False, True], ids=["by keys", "by pairs"])
@pytest.mark.parametrize("policy", [HeavyHitters(9, recent=3), PerHead(HeavyHitters(9, recent=3))])
def test_what_a_mask_hides_of_what_is_held_is_not_seen(policy: Any, dense: bool) -> None:
    """By n×n: the keys that are held, of those the ones that the mask shows, and nothing else."""
    model, cache = build(), caches.EvictingCache(build(), policy)
    mask = hiding(1)
    with torch.no_grad():
        model(text(), past_key_values=cache)
        held = [cache.positions(layer)[0] for layer in range(2)]
        assert all(((at >= 5) & (at < 15)).any() for at in held)
        shown = mask.bool()[:, None, None] if dense else mask
        got = model(text(1, 1), past_key_values=cache, attention_mask=shown).logits
    whole = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(text(), past_key_values=whole)
    tables = []
    for at in held:
        seen = torch.zeros(3, N + 1, dtype=torch.bool)
        for head, places in zip(seen, at.tolist(), strict=True):
            head[[i for i in places if i >= 0] + [N]] = True
        tables.append((seen & mask.bool()).repeat_interleave(2, 0)[None, :, None])
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, how, seen=seen: (args, how | {"attention_mask": seen}), with_kwargs=True
        )
        for layer, seen in zip(model.model.layers, tables, strict=True)
    ]
    with torch.no_grad():
        want = model(text(1, 1), past_key_values=whole).logits
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(got, want)


def test_keys_that_stay_keep_their_gradients() -> None:
    model, found = build(), []
    for budget in (N, N - 1):
        cache = caches.EvictingCache(model, HeavyHitters(budget, recent=4))
        words = model.model.embed_tokens(text()).detach().requires_grad_()
        model(inputs_embeds=words, past_key_values=cache)
        said = model(text(1, 3), past_key_values=cache).logits[0, -1].log_softmax(-1)[3]
        found.append(torch.autograd.grad(said, words)[0][0])
    # One token of each head went, which changes a gradient and does not end it.
    assert all((of.abs().sum(-1) > 0).sum() >= N - 1 for of in found)
    assert not torch.allclose(*found)


def sharing() -> Any:
    """A model whose last layers use the keys of others."""
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=4, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=64, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, eos_token_id=None,
        vocab_size_per_layer_input=61, hidden_size_per_layer_input=8, global_head_dim=8,
        num_global_key_value_heads=2,
    )  # fmt: skip
    kind = transformers.Gemma4ForCausalLM
    made = kind._from_config(config, attn_implementation="regard").eval().double()
    for name, weight in made.named_parameters():
        if "proj" in name or "embed" in name:
            weight.data.mul_(3)  # heads that look at something
    return made


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="a newer transformers")
def test_layers_that_use_keys_of_others_see_what_is_held() -> None:
    model, answers = sharing(), []
    want = later(model, transformers.DynamicCache(config=model.config), 3, more=hiding(3))
    got = later(model, caches.EvictingCache(model, LARGE), 3, more=hiding(3))
    torch.testing.assert_close(got, want)
    for poison in (0.0, 50.0):
        cache = caches.EvictingCache(model, PerHead(HeavyHitters(8, recent=0), floor=0.0))
        with torch.no_grad():
            model(text(), past_key_values=cache)
            layer = cache.layers[1]
            empty = ~layer.slots.filled
            assert empty.any()
            layer.keys[empty], layer.values[empty] = poison, poison
            answers.append(model(text(1, 1), past_key_values=cache).logits)
    assert torch.equal(*answers)


def bart() -> Any:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0,
        max_position_embeddings=64, eos_token_id=None, forced_eos_token_id=None, bos_token_id=1,
        decoder_start_token_id=2,
    )  # fmt: skip
    kind = transformers.BartForConditionalGeneration
    return kind._from_config(config, attn_implementation="regard").eval()


def test_keys_of_another_text_are_refused_and_have_their_own_cache() -> None:
    model = bart()
    with pytest.raises(RegardError, match=r"(?s)12 new keys for 1 quer.*EncoderDecoderCache\(Evi"):
        generate(model, text(12), caches.EvictingCache(model, LARGE))
    both = transformers.EncoderDecoderCache(
        caches.EvictingCache(model, LARGE), transformers.DynamicCache()
    )
    got, want = generate(model, text(12), both), generate(model, text(12), None)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits))


def test_a_call_that_failed_is_forgotten_after_reset() -> None:
    model = build()
    cache = caches.EvictingCache(model, LARGE)
    with pytest.raises(RegardError, match="is not known here"):
        model(text(), past_key_values=cache, foo=torch.ones(1))
    with pytest.raises(RegardError, match=r"(?s)was not told.*a call that failed.*cache\.reset"):
        model(text(), past_key_values=cache)
    cache.reset()
    fresh = caches.EvictingCache(model, LARGE)
    assert torch.equal(later(model, cache, 2), later(model, fresh, 2))
    with pytest.raises(RegardError, match="is not known here"):
        model(text(), past_key_values=fresh, foo=torch.ones(1))
    gone = weakref.ref(fresh)
    del fresh
    gc.collect()
    assert gone() is None


def two_in_turn() -> None:
    model = build(implementation="sdpa")
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    made = [caches.EvictingCache(model, LARGE) for _ in range(2)]
    for cache in (*made, *made):
        model(text(), past_key_values=cache)


def latent() -> None:
    config = transformers.DeepseekV3Config(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6, first_k_dense_replace=2,
    )  # fmt: skip
    kind = transformers.DeepseekV3ForCausalLM
    model = kind._from_config(config, attn_implementation="regard").eval()
    model(text(), past_key_values=caches.EvictingCache(model, LARGE))


def small_parts() -> None:
    model = build()
    real = torch.arange(N)[None] >= 10
    cache = caches.EvictingCache(model, LARGE)
    generate(model, text(), cache, attention_mask=real.long(), prefill_chunk_size=7)


def no_mask() -> None:
    model = build()
    cache = caches.EvictingCache(model, LARGE)
    model(text(), past_key_values=cache)
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, how: (args, how | {"attention_mask": None}), with_kwargs=True
    )
    model(text(3), past_key_values=cache)


WRONG = {
    "two caches in turn": (two_in_turn, r"(?s)was not told.*attn_implementation='sdpa'"),
    "latent attention": (latent, r"(?s)was not told.*'regard'.*not latent attention"),
    "parts smaller than padding": (small_parts, r"(?s)padded on the right.*prefill_chunk_size"),
    "no mask for more tokens": (no_mask, r"(?s)cannot follow.*no mask, for 3 more tokens after 24"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_done_is_refused(kind: str) -> None:
    ask, match = WRONG[kind]
    with pytest.raises(RegardError, match=match), torch.no_grad():
        ask()
