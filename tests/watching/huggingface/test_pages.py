"""Continuous batching by the name "regard": texts of all lengths in one row, keys in pages."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.errors import RegardError

transformers = pytest.importorskip("transformers")

from regard.watching.huggingface import attend, pages  # noqa: E402
from tests.watching.huggingface.test_by_name import both  # noqa: E402

FAMILIES = ("llama", "gpt2", "mistral", "gemma2", "gemma3_text", "gpt_oss", "cohere2")
"""Among them windows in all layers and in some, soft-caps, sinks and grouped heads."""
LENGTHS = (5, 17, 1, 40, 3)


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, 40, (n,), generator=draw).tolist() for n in LENGTHS]


GREEDY = transformers.GenerationConfig(
    max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=0
)


def alone(model: Any) -> list[tuple[list[int], Tensor]]:
    """Tokens and their log probabilities, one prompt after another."""
    found = []
    for prompt in prompts():
        told = model.generate(
            torch.tensor([prompt]), generation_config=GREEDY, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
        tokens = told.sequences[0, len(prompt) :]
        logits = torch.cat(told.logits).log_softmax(-1)
        found.append((tokens.tolist(), logits.gather(-1, tokens[:, None])[:, 0]))
    return found


def together(model: Any) -> list[tuple[list[int], Tensor]]:
    """The same of all prompts in one batch, in parts of no more than 24 tokens."""
    known = inspect.signature(transformers.ContinuousBatchingConfig).parameters
    size = {"page_size" if "page_size" in known else "block_size": 16}
    config = transformers.ContinuousBatchingConfig(
        num_blocks=64, max_batch_tokens=24, return_logprobs=True, **size
    )
    told = model.generate_batch(
        prompts(), generation_config=GREEDY, continuous_batching_config=config
    )
    found = [told[name] for name in sorted(told)]
    assert [one.error for one in found] == [None] * len(found)
    return [(one.generated_tokens, torch.tensor(one.logprobs)) for one in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_prompts_get_together_is_what_each_gets_alone(family: str) -> None:
    eager, ours = both(family)
    for got, want in zip(together(ours), alone(eager), strict=True):
        assert got[0] == want[0]
        torch.testing.assert_close(got[1], want[1], atol=2e-5, rtol=2e-4)
    assert ours.config._attn_implementation == "regard"


@pytest.mark.filterwarnings("ignore:The `paged:FutureWarning")
def test_the_older_name_is_the_same() -> None:
    _, ours = both("llama")
    want = together(ours)
    ours.set_attn_implementation("paged|regard")
    for got, expected in zip(together(ours), want, strict=True):
        assert got[0] == expected[0]


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_other_implementations_go_on_as_they_did(name: str) -> None:
    eager, _ = both("llama")
    eager.set_attn_implementation(name)
    assert [tokens for tokens, _ in together(eager)] == [tokens for tokens, _ in alone(eager)]
    assert eager.config._attn_implementation == name


def test_names_that_transformers_refuses_are_still_refused() -> None:
    eager, _ = both("llama")
    eager.set_attn_implementation("flex_attention")
    with pytest.raises((ValueError, KeyError), match=r"not supported|paged\|flex_attention"):
        together(eager)


def test_a_watch_of_one_thread_says_that_another_one_ran() -> None:
    _, ours = both("llama")
    with pytest.raises(RegardError, match="other threads") as error, regard.watch(ours):
        together(ours)
    assert "attach()" in str(error.value)


@pytest.mark.parametrize("name", ["regard", "sdpa"])
def test_an_attached_watch_sees_texts_one_after_another(name: str) -> None:
    _, ours = both("llama")
    ours.set_attn_implementation(name)
    want = together(ours)
    watch = regard.watch(ours, keep="traces")
    seen = watch.attach()
    try:
        got = together(ours)
    finally:
        watch.detach()
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    path, *_ = seen
    first = seen[path].traces[0]
    # The first prompts fill the first part: each sees itself, and nobody before it.
    weights = first.weights()[0]
    lengths = LENGTHS[:2]
    own = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths))
    shown = weights[:, : sum(lengths), : sum(lengths)]
    torch.testing.assert_close(shown.sum(-1), torch.ones(shown.shape[:2]))
    assert not bool((shown * (1 - own)).any())


class Held:
    """A cache of transformers 5.22 whose pages are one tensor: all keys of two texts."""

    def __init__(self, kind: str, keys: Tensor, ends: Tensor) -> None:
        self.keys, self.ends = keys, ends
        self.layer_to_allocator = {0: SimpleNamespace(layer_type=kind)}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        kwargs["cu_seq_lens_k"] = self.ends
        return self.keys, 2 * self.keys


def one_call(kind: str, ends_q: list[int], ends_k: list[int], filling: int = 0) -> Any:
    """A module, its queries, the cache, and what attention is told."""
    draw = torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.layer_idx, module.config = 0, SimpleNamespace(sliding_window=3)
    q = torch.randn(1, 4, ends_q[-1] + filling, 8, generator=draw)
    keys = torch.randn(1, 2, ends_k[-1] + filling, 8, generator=draw)
    cache = Held(kind, keys, torch.tensor(ends_k))
    told = {"cache": cache, "cu_seq_lens_q": torch.tensor(ends_q), "cu_seq_lens_k": {}}
    return module, q, cache, told


@pytest.mark.parametrize("filling", [0, 3])
@pytest.mark.parametrize(
    ("kind", "window"), [("full_attention", None), ("sliding_attention", None), ("full", 2)]
)
def test_each_text_is_a_call_of_its_own(kind: str, window: int | None, filling: int) -> None:
    # Four and one new tokens of texts of nine and five.
    module, q, cache, told = one_call(kind, [0, 4, 5], [0, 9, 14], filling)
    new = cache.keys[:, :, : q.shape[2]]
    out, _ = attend(module, q, new, new, None, scaling=0.7, sliding_window=window, **told)
    wide = 3 if kind == "sliding_attention" else window
    mask = masks.causal() if wide is None else masks.window(wide - 1)
    for queries, keys in ((slice(0, 4), slice(0, 9)), (slice(4, 5), slice(9, 14))):
        k = cache.keys[:, :, keys]
        want = regard.attention(q[:, :, queries], k, 2 * k, mask=mask, scale=0.7)
        torch.testing.assert_close(out[:, queries], want.transpose(1, 2))
    # What fills up the row sees no text.
    assert not out[:, 5:].isnan().any()


def test_steps_and_windows_are_told_apart() -> None:
    _, q, cache, told = one_call("full", [0, 4, 5], [0, 9, 14])
    ends_q, ends_k = told["cu_seq_lens_q"], cache.ends
    sizes = q.shape[2], cache.keys.shape[2]
    mask = pages._mask(cache, ends_q, ends_k, None, *sizes)
    assert pages._mask(cache, ends_q, ends_k, None, *sizes) is mask
    assert pages._mask(cache, ends_q, ends_k, 3, *sizes) is not mask
    assert pages._mask(cache, ends_q.clone(), ends_k, None, *sizes) is not mask
    again = pages._mask(cache, ends_q, ends_k, None, *sizes)
    # Written over, as whoever keeps one tensor for all steps does.
    ends_k[1] = 8
    assert pages._mask(cache, ends_q, ends_k, None, *sizes) is not again


def test_block_tables_are_refused() -> None:
    q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    told = {
        "cache": object(), "cu_seq_lens_q": torch.tensor([0, 3]), "block_table": torch.zeros(1),
    }  # fmt: skip
    with pytest.raises(RegardError, match="a table of blocks") as error:
        pages.opened(torch.nn.Module(), q, k, k, None, told)
    assert "max_blocks_per_request" in str(error.value)
