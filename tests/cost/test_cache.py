"""What caches hold, and how fast they let a model write."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from regard import cost, masks, nn

LLAMA = cost.preset("llama-3-8b")


def test_llama_3_8b_takes_128_kib_a_token() -> None:
    found = cost.cache_bytes(LLAMA, 131072)
    assert found.per_token == 2 * 32 * 8 * 128 * 2 == 131072
    assert found.in_context == 16 * 2**30


@pytest.mark.parametrize(
    ("name", "kib"),
    [("llama-2-7b", 512), ("llama-3-70b", 320), ("mistral-7b", 128), ("mixtral-8x7b", 128),
     ("gemma-2-9b", 336), ("qwen2.5-7b", 56), ("phi-3-mini", 384), ("gpt2", 72)],
)  # fmt: skip
def test_caches_of_known_models(name: str, kib: int) -> None:
    assert cost.cache_bytes(cost.preset(name), 1).per_token == kib * 1024
    assert cost.cache_bytes(cost.preset(name), 1).in_context == kib * 1024


def test_windows_bound_the_cache_of_their_layers() -> None:
    mistral, gemma = cost.preset("mistral-7b"), cost.preset("gemma-2-9b")
    assert cost.cache_bytes(mistral, 131072).in_context == 4096 * 131072
    layer = 2 * 8 * 256 * 2
    assert cost.cache_bytes(gemma, 131072).in_context == layer * 21 * (4096 + 131072)


@given(n=some.integers(1, 40), key_heads=some.sampled_from([1, 2, 4]), batch=some.integers(1, 3))
def test_a_real_cache_holds_what_is_predicted(n: int, key_heads: int, batch: int) -> None:
    c = cost.Configuration("one", 32, 4, 1, key_heads=key_heads, dtype="float32")
    cache = nn.Cache()
    cache.append(*(torch.zeros(batch, key_heads, n, 8) for _ in range(2)))
    assert cache.keys is not None
    assert cache.values is not None
    held = 4 * (cache.keys.numel() + cache.values.numel())
    assert held == cost.cache_bytes(c, n, batch).in_context


def test_decoding_reads_the_weights_once_and_the_cache_of_each() -> None:
    one, four = (cost.model(LLAMA, 8192, batch=b).decoding for b in (1, 4))
    assert one is not None
    assert four is not None
    words = LLAMA.vocabulary * LLAMA.width
    weights = 2 * (LLAMA.parameters - words)
    assert one.bytes_moved == weights + 2**30
    assert four.bytes_moved == weights + 4 * 2**30
    assert four.flops == 4 * one.flops
    assert one.flops == 2 * (LLAMA.parameters - words) + 4 * 32 * 32 * 128 * 8192


def test_tokens_per_second_are_bound_by_bandwidth() -> None:
    found = cost.model(LLAMA, 8192, device="H100 SXM")
    assert found.decoding is not None
    expected = 3350e9 / found.decoding.bytes_moved
    assert found.tokens_per_second() == pytest.approx(expected)
    assert found.decode_time().by == "memory"
    # On twice the bandwidth twice the tokens.
    fast = cost.Device("fast", found.device.rates, 2 * 3350e9)  # type: ignore[union-attr]
    assert found.tokens_per_second(fast) == pytest.approx(2 * expected)


def test_a_large_batch_is_bound_by_arithmetic() -> None:
    short = cost.model(LLAMA, 16, batch=4096, device="H100 SXM")
    assert short.decode_time().by == "arithmetic"
    assert short.tokens_per_second() > 1000 * cost.model(LLAMA, 16).tokens_per_second("L4") / 100


def test_experts_are_read_as_they_are_chosen() -> None:
    mixtral = cost.preset("mixtral-8x7b")
    one = mixtral.parameters_read(1)
    assert mixtral.parameters_read(4) == mixtral.parameters_read(400)
    assert mixtral.parameters_read(2) - one == 32 * 2 * 3 * 4096 * 14336
    # 12.9 billion are active, as published; of the words that come in a row is read.
    assert one + 32000 * 4096 == pytest.approx(12.9e9, rel=0.01)


def test_a_step_of_decoding_multiplies_what_one_more_token_of_a_call_does() -> None:
    q = torch.empty(1, 32, 1, 128, device="meta")
    k = torch.empty(1, 8, 8192, 128, device="meta")
    step = cost.call(q, k, k, mask=masks.causal()).flops()
    found = cost.model(LLAMA, 8192).decoding
    assert found is not None
    assert found.flops - 2 * LLAMA.parameters_read() == 32 * step
