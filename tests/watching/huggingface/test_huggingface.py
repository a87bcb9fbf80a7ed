"""Watching Hugging Face models: exact traces of what they do, and no other change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import RegardError, masks
from regard.masks.keep import Keep
from regard.seen import Layer
from regard.values import Shape

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, masking_utils  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402

from regard.watching import huggingface  # noqa: E402
from regard.watching.huggingface.symbolic_mask import SymbolicMask  # noqa: E402

Sizes = dict[str, Any]
N = 9

TEXT: Sizes = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GROUPED: Sizes = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
SLIDING: Sizes = GROUPED | {"sliding_window": 4}
GEMMA: Sizes = SLIDING | {"query_pre_attn_scalar": 8}
IMAGE: Sizes = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
SEQUENCE: Sizes = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

DECODERS: dict[str, tuple[str, Sizes]] = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", SLIDING),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "phi3": ("Phi3ForCausalLM", TEXT | {"num_key_value_heads": 2}),
    "gemma2": ("Gemma2ForCausalLM", GEMMA | {"attn_logit_softcapping": 2.0}),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": ("GptOssForCausalLM", SLIDING | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "gpt_neox": ("GPTNeoXForCausalLM", TEXT),
    "gpt2": ("GPT2LMHeadModel", {
        "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2,
    }),
    "opt": ("OPTForCausalLM", {
        "vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
    }),
    "deepseek_v3": ("DeepseekV3ForCausalLM", TEXT | {
        "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 6, "moe_intermediate_size": 16, "n_group": 2,
        "n_routed_experts": 4, "topk_group": 1, "num_experts_per_tok": 2,
    }),
    "cohere2": ("Cohere2ForCausalLM", SLIDING),
    "olmo2": ("Olmo2ForCausalLM", GROUPED),
    "llama4_text": ("Llama4ForCausalLM", GROUPED | {
        "attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 32,
    }),
}  # fmt: skip
ENCODERS: dict[str, tuple[str, Sizes]] = {
    "bert": ("BertModel", TEXT),
    "roberta": ("RobertaModel", TEXT),
    "electra": ("ElectraModel", TEXT | {"embedding_size": 32}),
    "albert": ("AlbertModel", TEXT | {"embedding_size": 32}),
    "distilbert": ("DistilBertModel", {
        "vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4,
    }),
    "modernbert": ("ModernBertModel", TEXT | {
        "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1,
        "sep_token_id": 2,
    }),
}  # fmt: skip
OTHERS: dict[str, tuple[str, Sizes]] = {
    "t5": ("T5ForConditionalGeneration", {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0,
    }),
    "bart": ("BartForConditionalGeneration", SEQUENCE | {"forced_eos_token_id": None}),
    "whisper": ("WhisperForConditionalGeneration", SEQUENCE | {
        "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32,
        "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
    }),
    "vit": ("ViTModel", IMAGE),
    "dinov2": ("Dinov2Model", IMAGE),
    "swin": ("SwinModel", {
        "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 2,
    }),
    "clip": ("CLIPModel", {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}),
    "siglip": ("SiglipModel", {"text_config": TEXT, "vision_config": IMAGE}),
    "wav2vec2": ("Wav2Vec2Model", {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "conv_dim": [16, 16], "conv_kernel": [5, 3],
        "conv_stride": [3, 2], "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
        "num_feat_extract_layers": 2, "mask_time_prob": 0.0,
    }),
}  # fmt: skip
FAMILIES = DECODERS | ENCODERS | OTHERS


def random(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(family: str, implementation: str = "eager", **changes: Any) -> Any:
    """A small model of a family."""
    name, sizes = FAMILIES[family]
    kind = getattr(transformers, name)
    config = kind.config_class(**sizes | changes)
    return enlivened(kind._from_config(config, attn_implementation=implementation))


def enlivened(model: Any) -> Any:
    """With weights large enough that attention is not uniform."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, p in model.named_parameters():
            if p.ndim > 1 or "sink" in path:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model.eval()


def tokens(batch: int = 2, n: int = N, seed: int = 2) -> Tensor:
    return torch.randint(3, 64, (batch, n), generator=torch.Generator().manual_seed(seed))


def padded(*lengths: int, n: int = N, left: bool = False) -> Tensor:
    real = (torch.arange(n) < torch.tensor(lengths)[:, None]).long()
    return real.flip(1) if left else real


def inputs(model: Any, family: str) -> dict[str, Tensor]:
    pixels = {"pixel_values": random(2, 3, 16, 16)}
    text = {"input_ids": tokens(), "attention_mask": padded(N, 6)}
    if family in ("vit", "dinov2", "swin"):
        return pixels
    if family in ("clip", "siglip"):
        return text | pixels
    if family == "wav2vec2":
        return {"input_values": random(2, 200), "attention_mask": padded(200, 120, n=200)}
    if family == "whisper":
        return {"input_features": random(2, 8, 24), "decoder_input_ids": tokens()}
    if model.config.is_encoder_decoder:
        return text | {"decoder_input_ids": tokens(n=5)}
    return text


def answers(output: Any, given: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """What a model answers, and which of its places are real."""
    names = ("logits", "last_hidden_state", "text_embeds", "image_embeds")
    real = given.get("attention_mask")
    for name in names:
        answer = output.get(name)
        if answer is not None:
            fits = real is not None and answer.shape[:2] == real.shape
            yield answer, real.bool() if real is not None and fits else None


def with_weights(model: nn.Module, run: Callable[[], Any]) -> tuple[Any, dict[str, list[Tensor]]]:
    """A run, and the weights that eager attention hands from its modules."""
    found: dict[str, list[Tensor]] = {}

    def note(path: str) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            last = output[-1] if isinstance(output, tuple) else None
            if isinstance(last, Tensor) and last.ndim == 4:
                found.setdefault(path, []).append(last)

        return hook

    modules = dict(model.named_modules())
    handles = [
        modules[path].register_forward_hook(note(path)) for path in huggingface.attenders(model)
    ]
    try:
        return run(), found
    finally:
        for handle in handles:
            handle.remove()


def agree_on_weights(layer: Layer, want: list[Tensor]) -> None:
    assert layer.calls == len(layer.traces) == len(want)
    for trace, weights in zip(layer.traces, want, strict=True):
        got = trace.weights()
        # Eager attention spreads a row that sees nothing over everything: here it stays empty.
        seeing = trace.lse.isfinite()
        torch.testing.assert_close(got[seeing], weights[seeing], atol=2e-6, rtol=2e-5)
        assert (got[~seeing] == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_weights_are_those_of_eager_attention(family: str) -> None:
    model = build(family)
    given = inputs(model, family)
    with torch.no_grad():
        want, weights = with_weights(model, lambda: model(**given))
        with regard.watch(model, keep="traces") as seen:
            got = model(**given)
    compared = 0
    for (a, real), (b, _) in zip(answers(want, given), answers(got, given), strict=True):
        a, b = (a, b) if real is None else (a[real], b[real])
        torch.testing.assert_close(b, a, atol=2e-6 * float(a.abs().max()), rtol=2e-5)
        compared += 1
    assert compared
    assert sorted(weights) == sorted(huggingface.attenders(model))
    for path, matrices in weights.items():
        agree_on_weights(seen[path], matrices)


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_masks_stay_symbolic(family: str) -> None:
    model = build(family)
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        model(**inputs(model, family))
    for layer in seen.values():
        mask = layer.traces[0].mask
        assert mask is not None
        assert all(t.numel() <= 2 * N for t in mask.tensors())


def test_masks_are_the_ones_a_model_means() -> None:
    def mask(family: str, layer: int = 0, **given: Tensor) -> Any:
        model = build(family)
        with torch.no_grad(), regard.watch(model, keep="traces") as seen:
            model(tokens(), **given)
        return list(seen.values())[layer].trace.mask

    right, left = padded(N, 6), padded(N, 6, left=True)
    assert mask("llama") == masks.causal()
    assert mask("llama", attention_mask=right) == masks.causal() & masks.padding([N, 6])
    kept = masks.keep(left.bool()[:, None, None])
    assert mask("llama", attention_mask=left) == masks.causal() & kept
    assert mask("mistral") == masks.window(3, None) & masks.causal()
    assert mask("gemma2", 0) == masks.window(3, None) & masks.causal()
    assert mask("gemma2", 1) == masks.causal()
    assert mask("bert") is None
    assert mask("bert", attention_mask=right) == masks.padding([N, 6])
    assert mask("modernbert", 1) == masks.window(2, 2)


def test_images_between_words() -> None:
    text = GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=IMAGE, mm_tokens_per_image=4, image_token_id=63,
        boi_token_id=62, eoi_token_id=61,
    )  # fmt: skip
    kind = transformers.Gemma3ForConditionalGeneration
    model = enlivened(kind._from_config(config, attn_implementation="eager"))
    ids = tokens(1).clamp_max(60)
    ids[0, 2:6] = 63
    given = {
        "input_ids": ids,
        "token_type_ids": (ids == 63).long(),
        "pixel_values": random(1, 3, 16, 16),
    }
    with torch.no_grad():
        want, weights = with_weights(model, lambda: model(**given).logits)
        with regard.watch(model, keep="traces") as seen:
            got = model(**given).logits
    torch.testing.assert_close(got, want, atol=2e-6 * float(want.abs().max()), rtol=2e-5)
    for path, matrices in weights.items():
        agree_on_weights(seen[path], matrices)
    # Words look back; the patches of an image look at each other.
    ids = torch.tensor([[-1, -1, 0, 0, 0, 0, -1, -1, -1]])
    image = masks.documents(ids) & masks.keep((ids >= 0)[:, None, None])
    full = seen["model.language_model.layers.1.self_attn"].trace
    assert full.mask == masks.causal() | image


def test_packed_documents_stay_apart() -> None:
    model, places = build("llama"), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    how = {"position_ids": places, "use_cache": False}
    with torch.no_grad():
        want = model(tokens(1), **how).logits
        with regard.watch(model, keep="traces") as seen:
            torch.testing.assert_close(model(tokens(1), **how).logits, want, atol=1e-4, rtol=1e-5)
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2]])
    first = seen["model.layers.0.self_attn"].trace
    assert first.mask == masks.causal() & masks.documents(ids)


BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1, 1, -1, 2]])
PARTS: dict[str, Callable[[], Any]] = {
    "causal": lambda: masking_utils.causal_mask_function,
    "bidirectional": lambda: masking_utils.bidirectional_mask_function,
    "sliding": lambda: masking_utils.sliding_window_causal_mask_function(3),
    "two-sided": lambda: masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunked": lambda: masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 2])),
    "packed": lambda: masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.packed_sequence_mask_function(torch.arange(24).view(2, 12) // 5),
    ),
    "blockwise": lambda: masking_utils.or_masks(
        masking_utils.causal_mask_function,
        masking_utils.blockwise_overlay(BLOCKS.expand(2, -1)),
    ),
    "all or nothing": lambda: masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    ),
    "padding inside": lambda: masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.padding_mask_function(padded(12, 7, n=12, left=True).bool()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize(
    "lengths", [(12, 12, 0, 0), (1, 9, 8, 0), (3, 12, 5, 0), (2, 6, 9, 5), (4, 4, 3, 3)]
)
@pytest.mark.parametrize("part", PARTS)
def test_recovered_masks_are_the_dense_ones(
    part: str, lengths: tuple[int, int, int, int], padding: str | None
) -> None:
    real = None if padding is None else padded(12, 7, n=12, left=padding == "left").bool()
    how = {"mask_function": PARTS[part](), "attention_mask": real}
    got = huggingface.make_mask(2, *lengths, **how)
    assert isinstance(got, SymbolicMask)
    want = masking_utils.sdpa_mask(2, *lengths, **how, allow_is_causal_skip=False)
    assert torch.equal(got.dense(), want.expand_as(got.dense()))


def test_masks_that_are_not_known_are_built() -> None:
    def odd(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + k) % 2 == 0

    unknown = masking_utils.and_masks(masking_utils.causal_mask_function, odd)
    got = huggingface.make_mask(1, 5, 5, mask_function=unknown)
    want = masking_utils.sdpa_mask(1, 5, 5, mask_function=unknown, allow_is_causal_skip=False)
    assert not isinstance(got, SymbolicMask)
    assert torch.equal(got, want)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_that_hides_everything_is_built(window: int) -> None:
    hiding = masking_utils.sliding_window_causal_mask_function(window)
    assert not huggingface.make_mask(1, 5, 5, mask_function=hiding).any()


def test_keys_chosen_by_an_indexer() -> None:
    q, k = random(2, 4, 5, 8), random(2, 4, 5, 8, seed=3)
    chosen = torch.tensor([[0, 2], [1, 3]])[:, None].expand(2, 5, 2)
    causal = huggingface.make_mask(2, 5, 5)
    out, _ = huggingface.attend(nn.Identity(), q, k, k, causal, indices=chosen)
    keep = torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    keep[0, :, :, [0, 2]] = keep[1, :, :, [1, 3]] = True
    want = regard.attention(q, k, k, mask=masks.causal() & masks.keep(keep))
    torch.testing.assert_close(out.transpose(1, 2), want)


def test_dense_masks_given_by_the_caller() -> None:
    model = build("llama")
    allowed = (random(2, 1, N, N) > 0) | torch.eye(N, dtype=torch.bool)
    added = torch.where(allowed, 0.0, -torch.inf)
    with torch.no_grad():
        want = model(tokens(), attention_mask=added).logits
        with regard.watch(model, keep="traces") as seen:
            for given in (added, allowed):
                got = model(tokens(), attention_mask=given).logits
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
    first, second = seen["model.layers.0.self_attn"].traces
    assert first.mask is None
    assert second.mask == Keep(allowed)


@pytest.mark.parametrize("how", ["dynamic", "static", "beams"])
@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen3", "t5"]
)
def test_generated_tokens_are_the_same(family: str, how: str) -> None:
    model = build(family)
    ids, real = tokens(n=6), padded(6, 4, n=6, left=True)
    options = {
        "dynamic": {},
        "static": {"cache_implementation": "static"},
        "beams": {"num_beams": 2},
    }[how]
    options |= {"attention_mask": real, "max_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    want = model.generate(ids, eos_token_id=None, **options)
    with regard.watch(model, keep="traces") as seen:
        got = model.generate(ids, eos_token_id=None, **options)
    assert torch.equal(got, want)
    for layer in seen.values():
        assert all(t.mask is None or not _square(t.mask) for t in layer.traces)
    if family != "t5":
        assert all(layer.runs == list(range(6)) for layer in seen.values())


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "qwen3", "bart"])
def test_steps_of_generating_are_the_trace_of_the_whole_text(family: str) -> None:
    model = build(family)
    ids, real = tokens(n=6), padded(6, 4, n=6, left=True)
    if family == "bart":
        real = padded(6, 4, n=6)
    options = {"attention_mask": real, "max_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    with regard.watch(model, keep="traces") as seen:
        written = model.generate(ids, eos_token_id=None, **options)
    read = written[:, :-1]
    given = {"input_ids": ids, "attention_mask": real, "decoder_input_ids": read}
    if family != "bart":
        longer = torch.cat([real, torch.ones(2, read.shape[1] - 6, dtype=real.dtype)], 1)
        places = (longer.cumsum(1) - 1).clamp_min(0)
        given = {"input_ids": read, "attention_mask": longer, "position_ids": places}
    with torch.no_grad(), regard.watch(model, keep="traces") as whole:
        model(**given)
    for path, layer in whole.items():
        trace, want = seen[path].joined, layer.trace
        assert trace.inputs.shape == want.inputs.shape
        seeing = want.lse.isfinite()
        torch.testing.assert_close(
            trace.weights()[seeing], want.weights()[seeing], atol=1e-4, rtol=1e-3
        )


def _square(mask: masks.Mask) -> bool:
    return any(t.ndim == 4 and t.shape[2] > 1 for t in mask.tensors())


@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bert", "t5"])
def test_gradients_are_the_same(family: str, checkpointing: bool | None) -> None:
    model = build(family)
    quiet = {n: 0.0 for n in vars(model.config) if "dropout" in n}
    model = build(family, **quiet).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    given: dict[str, Any] = inputs(model, family)
    if checkpointing is not None:
        given["use_cache"] = False

    def learn() -> dict[str, Tensor]:
        model.zero_grad()
        output = next(iter(answers(model(**given), {})))[0]
        # Squares alone would have no gradient behind BERT's last norm.
        (output * torch.linspace(-1, 1, output.shape[-1])).square().mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    want = learn()
    with regard.watch(model) as seen:
        got = learn()
    assert got.keys() == want.keys()
    # Rows of padding that see nothing differ; nothing that is real looks at them. Each of the two
    # errs by up to 2e-5 against float64, T5 most, whose logits are not scaled.
    for name, grad in want.items():
        torch.testing.assert_close(
            got[name], grad, atol=5e-5 * float(grad.abs().max() + 1e-3), rtol=1e-4, msg=name
        )
    assert {layer.calls for layer in seen.values()} == {1}


def test_dropout_only_while_training() -> None:
    model = build("llama", attention_dropout=0.5)
    with torch.no_grad():
        plain, weights = with_weights(model, lambda: model(tokens()).logits)
        with regard.watch(model, keep="traces") as seen:
            torch.testing.assert_close(model(tokens()).logits, plain, atol=1e-4, rtol=1e-5)
            dropped = model.train()(tokens()).logits
    assert not torch.allclose(dropped, plain, atol=1e-2)
    # Weights are those before dropout.
    first = seen["model.layers.0.self_attn"].traces[1]
    want = weights["model.layers.0.self_attn"][0]
    torch.testing.assert_close(first.weights(), want, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("family", ["llama", "t5", "whisper", "gpt2"])
def test_weights_that_were_asked_of_the_model(family: str) -> None:
    model = build(family)
    given = inputs(model, family)
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    with torch.no_grad():
        want = model(**given, output_attentions=True)
        with regard.watch(model):
            got = model(**given, output_attentions=True)
    shown = [name for name in names if want.get(name)]
    assert shown
    for name in shown:
        for a, b in zip(want[name], got[name], strict=True):
            torch.testing.assert_close(b, a, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(
    ("family", "dropout"),
    [("llama", 0.0), ("llama", 0.5), ("gpt_oss", 0.0), ("t5", 0), ("bert", 0)],
)
def test_weights_that_were_asked_for_have_gradients(family: str, dropout: float) -> None:
    off = {n: 0.0 for n in vars(build(family).config) if "dropout" in n}
    model = build(family, **off | ({"attention_dropout": dropout} if dropout else {})).train()
    given = inputs(model, family) | {"output_attentions": True}
    # Rows that see nothing are spread over everything by eager attention.
    given.pop("attention_mask", None)

    def learn() -> tuple[list[Tensor], Any]:
        model.zero_grad()
        output = model(**given)
        name = next(n for n in ("attentions", "encoder_attentions") if output.get(n))
        for weights in output[name]:
            weights.retain_grad()
        answer = next(iter(answers(output, {})))[0]
        (answer * random(*answer.shape)).sum().backward()
        return [weights.grad for weights in output[name]], output

    want, _ = learn()
    with regard.watch(model, keep="traces") as seen:
        got, output = learn()
    assert all(grad is not None and grad.any() for grad in (*want, *got))
    if not dropout:
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5 * float(b.abs().max()), rtol=1e-3)
    shown = output.get("attentions") or output["encoder_attentions"]
    torch.testing.assert_close(next(iter(seen.values())).trace.weights(), shown[0].detach())


HARMLESS: dict[str, Any] = {
    "shift_labels": torch.ones(1, N, dtype=torch.int64),
    "ignore_index": -1,
    "cache_position": torch.arange(N),
    "seq_idx": torch.zeros(1, N, dtype=torch.int32),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_arguments_that_change_no_attention_are_passed_over(name: str) -> None:
    model = build("llama")
    with torch.no_grad():
        want = model(tokens(1), **{name: HARMLESS[name]}).logits
        with regard.watch(model, keep="traces") as seen:
            got = model(tokens(1), **{name: HARMLESS[name]}).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
    assert seen["model.layers.0.self_attn"].trace.mask == masks.causal()


def ends(*places: int) -> dict[str, Any]:
    """Sequences that stand one after the other, as FlashAttention is told of them."""
    at = torch.tensor(places, dtype=torch.int32)
    longest = int(at.diff().max())
    return {
        "cu_seq_lens_q": at, "cu_seq_lens_k": at, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_packed_sequences_are_passed_over_where_the_model_does(implementation: str) -> None:
    model = build("llama", implementation)
    with torch.no_grad():
        want = model(tokens(1), **ends(0, 4, 7, 9)).logits
        with regard.watch(model, keep="traces") as seen:
            got = model(tokens(1), **ends(0, 4, 7, 9)).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
    assert seen["model.layers.0.self_attn"].trace.mask == masks.causal()


def test_packed_sequences_stay_apart_where_flash_attention_keeps_them_apart() -> None:
    """FlashAttention runs on a card; what it would give is known: each sequence by itself."""
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    with torch.no_grad():
        alone = [build("llama")(part).logits for part in tokens(1).split((4, 3, 2), 1)]
        model = build("llama")
        model.config._attn_implementation_internal = "flash_attention_2"
        with regard.watch(model, keep="traces") as seen:
            for how in ({"position_ids": places, "use_cache": False}, {"position_ids": places}):
                got = model(tokens(1), **how, **ends(0, 4, 7, 9)).logits
                torch.testing.assert_close(got, torch.cat(alone, 1), atol=1e-4, rtol=1e-5)
            # Less than all four arguments say nothing to FlashAttention either.
            some = ends(0, 4, 7, 9) | {"max_length_q": None}
            model(tokens(1), **some)
    layer = seen["model.layers.0.self_attn"]
    apart = layer.traces[1].weights()
    assert apart[..., 4:, :4].eq(0).all()
    assert apart[..., 7:, :7].eq(0).all()
    assert layer.traces[2].mask == masks.causal()


def test_packed_sequences_that_cannot_be_told_apart_are_refused() -> None:
    q = random(2, 2, 5, 8)
    mask = huggingface.make_mask(2, 5, 5)
    huggingface.attend(nn.Identity(), q, q, q, mask, **ends(0, 2, 5, 10))
    with pytest.raises(RegardError, match="go on in the next row"):
        huggingface.attend(nn.Identity(), q, q, q, mask, **ends(0, 2, 10))
    with pytest.raises(RegardError, match="other sequences than keys"):
        huggingface.attend(nn.Identity(), q, q, q, mask, **ends(0, 2, 5))
    other = ends(0, 5, 10) | {"cu_seq_lens_q": torch.tensor([0, 2, 10])}
    with pytest.raises(RegardError, match="other sequences than keys"):
        huggingface.attend(nn.Identity(), q, q, q, mask, **other)


def state(model: nn.Module) -> Any:
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    return (
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
        [copy.deepcopy(vars(config)) for config in configs],
        [config._attn_implementation for config in configs],
        sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
    )


def test_layers_that_were_seen_are_seen_wherever_a_run_begins() -> None:
    """Once it is known whose attention it is, modules are not followed inside of a run."""
    model, hooked = build("bert"), []
    path = "encoder.layer.1.attention.self"
    part = model.get_submodule(path)
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        for _ in range(3):
            model(tokens())
        alone = random(2, N, 32)
        part(alone)
        with part.register_forward_hook(lambda *_: hooked.append(True)):
            model(tokens())
        handle = nn.modules.module.register_module_forward_hook(lambda *_: hooked.append(False))
        with handle:
            part(alone)
            model(tokens())
    assert [layer.calls for layer in seen.values()] == [5, 7]
    assert seen[path].runs == [0, 1, 2, 3, 4, 5, 6]
    assert hooked[0] is True
    assert hooked.count(False) > 20
    with torch.no_grad(), regard.watch(model) as again, regard.watch(model) as other:
        model(tokens())
        model(tokens())
    assert [s[path].calls for s in (again, other)] == [2, 2]


def test_a_layer_that_was_seen_may_attend_by_more_later() -> None:
    """A hook that attends, added when the layer is known, attends inside of that layer."""
    model, hooked = build("bert"), []
    path = "encoder.layer.1.attention.self"

    def attends(*_: Any) -> None:
        q = random(2, 2, 3, 4)
        hooked.append(nn.functional.scaled_dot_product_attention(q, q, q))

    with torch.no_grad(), regard.watch(model) as seen:
        for _ in range(2):
            model(tokens())
        with model.get_submodule(f"{path}.query").register_forward_hook(attends):
            model(tokens())
        model(tokens())
    assert len(hooked) == 1
    assert [layer.calls for layer in seen.values()] == [4, 5]
    assert seen[path].calls == 5


def test_hooks_in_the_place_of_ours_are_called() -> None:
    """Who clears the hooks of a module that is known, and adds one, has that one called."""
    model, hooked = build("bert"), []
    part = model.get_submodule("encoder.layer.1.attention.self")
    with torch.no_grad(), regard.watch(model) as seen:
        for _ in range(2):
            model(tokens())
        part._forward_hooks.clear()
        with part.register_forward_hook(lambda *_: hooked.append(True)):
            model(tokens())
    assert hooked == [True]
    assert [layer.calls for layer in seen.values()] == [3, 3]


@pytest.mark.parametrize("kind", ["booleans", "floats"])
def test_a_dense_mask_is_read_once_for_all_layers(kind: str) -> None:
    model, dense = (
        build("llama", "sdpa"),
        torch.rand(2, 1, N, N, generator=torch.manual_seed(0)) < 0.5,
    )
    dense |= torch.eye(N, dtype=torch.bool)
    given = (
        dense.clone() if kind == "booleans" else torch.zeros(dense.shape).masked_fill(~dense, -1e9)
    )
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        model(tokens(), attention_mask=given)
        given.copy_(given.flip(0))
        model(tokens(), attention_mask=given)
    first, second = (layer.traces for layer in seen.values())
    for a, b in zip(first, second, strict=True):
        assert a.mask is b.mask
        assert (a.inputs.bias is None) == (kind == "booleans")
    assert ((first[1].weights() > 1e-30) == dense.flip(0)).all()


@pytest.mark.parametrize("family", ["llama", "t5", "clip", "siglip"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_nothing_is_left_behind(family: str, implementation: str) -> None:
    model = build(family, implementation)
    given, before = inputs(model, family), state(model)
    with torch.no_grad(), regard.watch(model):
        watched = []
        model.register_forward_pre_hook(lambda *_: watched.append(state(model)))
        model(**given)
        assert watched[0] != before
        model._forward_pre_hooks.popitem()
    assert state(model) == before
    with pytest.raises(KeyError), regard.watch(model):
        raise KeyError("mine")
    assert state(model) == before

    def fail(*_: Any) -> None:
        raise KeyError("deep inside")

    last = model.get_submodule(huggingface.attenders(model)[-1])
    with last.register_forward_pre_hook(fail), pytest.raises(KeyError), regard.watch(model):
        model(**given)
    assert state(model) == before


@pytest.mark.parametrize("family", ["llama", "bert", "t5", "clip", "gpt2"])
def test_only_what_attends_is_hooked(family: str) -> None:
    """Hooks on the other modules of a layer would take longer than a GPU takes for the layer."""
    model = build(family)
    with torch.no_grad(), regard.watch(model) as seen:
        hooked = {path for path, m in model.named_modules() if m._forward_hooks}
        model(**inputs(model, family))
    assert set(seen) == set(huggingface.attenders(model))
    assert {"", *seen} <= hooked
    assert all("attention" in type(model.get_submodule(p)).__name__.lower() for p in hooked - {""})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_watches_of_one_model(order: tuple[int, int]) -> None:
    model = build("llama", "sdpa")
    before = state(model)
    watches = [regard.watch(model), regard.watch(model.model)]
    seen = [watch.attach() for watch in watches]
    with torch.no_grad():
        model(tokens())
        watches[order[0]].detach()
        model(tokens())
    watches[order[1]].detach()
    assert state(model) == before
    assert [next(iter(s.values())).calls for s in seen] == [1 + order[0], 1 + order[1]]


def test_a_model_inside_another() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build("llama", "sdpa")

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids).logits

    model = Wrapper()
    with torch.no_grad(), regard.watch(model) as seen:
        model(tokens())
    assert list(seen) == [f"inner.model.layers.{i}.self_attn" for i in (0, 1)]


@pytest.mark.compiled
@pytest.mark.parametrize("when", ["before", "inside"])
def test_compiled_models(when: str) -> None:
    model = build("llama", "sdpa")
    given = inputs(model, "llama")
    real = given["attention_mask"].bool()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        want = model(**given).logits[real]
        if when == "before":
            compiled(**given)
        with regard.watch(compiled, keep="traces") as seen:
            got = compiled(**given).logits[real]
        again = compiled(**given).logits[real]
    for answer in (got, again):
        torch.testing.assert_close(answer, want, atol=1e-4, rtol=1e-5)
    assert list(seen) == [f"_orig_mod.model.layers.{i}.self_attn" for i in (0, 1)]
    assert all(
        layer.trace.mask == masks.causal() & masks.padding([N, 6]) for layer in seen.values()
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_that_run_again_too_late_say_so(reentrant: bool) -> None:
    model = build("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with regard.watch(model):
        loss = model(**inputs(model, "llama"), use_cache=False).logits.square().mean()
    with pytest.raises(RegardError, match=r"call backward\(\) while the model is watched"):
        loss.backward()


def test_some_layers_some_runs() -> None:
    model = build("llama")
    with torch.no_grad(), regard.watch(model, layers=["*.1.*"], every=2, keep="traces") as seen:
        for _ in range(3):
            model(tokens())
    assert list(seen) == ["model.layers.1.self_attn"]
    assert seen["model.layers.1.self_attn"].runs == [0, 2]


BY_HAND: dict[str, tuple[str, Sizes]] = {
    "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "gptj": ("GPTJForCausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "deberta": ("DebertaModel", TEXT),
    "deberta-v2": ("DebertaV2Model", TEXT),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", BY_HAND)
def test_attention_computed_by_hand_is_seen(family: str) -> None:
    name, sizes = BY_HAND[family]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**{"vocab_size": 64} | sizes)).eval()
    before = state(model)
    with torch.no_grad():
        want = model(tokens(), output_attentions=True)
        with regard.watch(model, keep="traces") as seen:
            got = model(tokens())
    assert torch.equal(got[0], want[0])
    assert len(seen) == len(want.attentions) == 2
    for layer, weights in zip(seen.values(), want.attentions, strict=True):
        torch.testing.assert_close(layer.trace.weights(), weights, atol=1e-6, rtol=1e-5)
    assert state(model) == before


def test_attention_computed_in_blocks_is_named() -> None:
    kind = transformers.LongformerModel
    sizes = {"vocab_size": 64, "attention_window": 4} | TEXT
    model = kind(kind.config_class(**sizes)).eval()
    failing = pytest.raises(
        RegardError,
        match=r"attention by hand in encoder\.layer\.0\.attention\.self[\s\S]*output_attentions",
    )
    with failing, torch.no_grad(), regard.watch(model):
        model(tokens())


def test_attention_that_is_by_hand_only_sometimes() -> None:
    kind = transformers.FalconForCausalLM
    sizes = {n: v for n, v in TEXT.items() if n != "intermediate_size"}
    quick, slow = (
        kind._from_config(kind.config_class(**sizes), attn_implementation=name).eval()
        for name in ("sdpa", "eager")
    )
    slow.load_state_dict(quick.state_dict())
    weights = []
    for model in (quick, slow):
        with torch.no_grad(), regard.watch(model, keep="traces") as seen:
            model(tokens())
        weights.append([layer.trace.weights() for layer in seen.values()])
    assert len(weights[0]) == 2
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-5)


def test_a_model_without_attention() -> None:
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    model = transformers.MambaForCausalLM(config).eval()
    failing = pytest.raises(RegardError, match=r"no attention was seen\n.*\(mamba\)")
    with failing, torch.no_grad(), regard.watch(model):
        model(tokens())


def test_layers_that_go_unseen_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    second = model.model.layers[1].self_attn
    monkeypatch.setattr(second, "forward", lambda hidden_states, **_: (hidden_states, None))
    failing = pytest.raises(RegardError, match=r"LlamaForCausalLM: model\.layers\.1\.self_attn\n")
    with failing, torch.no_grad(), regard.watch(model):
        model(tokens())
    with torch.no_grad(), regard.watch(model, layers=["*.0.*"]) as seen:
        model(tokens())
    assert len(seen) == 1


def test_modules_that_say_so_in_their_name_are_named() -> None:
    """Linear attention beside attention: nothing of it can be seen."""
    config = transformers.MiniMaxConfig(
        **GROUPED, layer_types=["linear_attention", "full_attention"], num_local_experts=2,
        num_experts_per_tok=1, block_size=4,
    )  # fmt: skip
    kind = transformers.MiniMaxForCausalLM
    model = enlivened(kind._from_config(config, attn_implementation="eager"))
    failing = pytest.raises(RegardError, match=r"MiniMaxForCausalLM: model\.layers\.0\.self_attn\n")
    with failing as caught, torch.no_grad(), regard.watch(model):
        model(tokens())
    # It runs as such while it is watched: another name would change nothing.
    assert "sdpa" not in str(caught.value)
    with torch.no_grad(), regard.watch(model, layers="*.1.*") as seen:
        model(tokens())
    assert list(seen) == ["model.layers.1.self_attn"]


@pytest.mark.parametrize("name", ["block_indices", "block_table", "my_own"])
def test_arguments_that_are_not_known_are_refused(name: str) -> None:
    q = random(1, 2, 5, 8)
    with pytest.raises(RegardError, match=f"got:      {name}="):
        huggingface.attend(nn.Identity(), q, q, q, None, **{name: torch.ones(1)})


def test_masks_that_cannot_be_placed_are_refused() -> None:
    q = random(1, 2, 5, 8)
    with pytest.raises(RegardError, match="a window and gives no mask"):
        huggingface.attend(nn.Identity(), q, q, q, None, sliding_window=2)
    with pytest.raises(RegardError, match="could mean several things"):
        huggingface.attend(nn.Identity(), q, q, q, torch.ones(1, 5, dtype=torch.bool))
    other = huggingface.make_mask(1, 4, 4)
    with pytest.raises(RegardError, match=r"a mask of \[4, 4\] for 5 queries and 5 keys"):
        huggingface.attend(nn.Identity(), q, q, q, other)


@pytest.mark.parametrize("own", [None, True, False])
@pytest.mark.parametrize("asked", [None, True, False])
def test_without_a_mask_the_module_says_whether_it_is_causal(
    own: bool | None, asked: bool | None
) -> None:
    module, q, k = nn.Identity(), random(1, 2, 5, 8), random(1, 2, 7, 8, seed=3)
    if own is not None:
        module.is_causal = own
    causal = next((c for c in (asked, own) if c is not None), False)
    out, _ = huggingface.attend(module, q, k, k, None, is_causal=asked)
    want = regard.attention(q, k, k, mask=masks.causal(offset=0) if causal else None)
    torch.testing.assert_close(out.transpose(1, 2), want)


def test_a_symbolic_mask_passes_for_a_tensor() -> None:
    mask = SymbolicMask.of(masks.causal(), Shape(2, 1, 3, 3), torch.device("cpu"))
    dense = masks.causal().dense(3).expand(2, 1, 3, 3)
    for same in (
        mask.contiguous(),
        mask.clone(),
        mask.detach(),
        mask.to("cpu"),
        mask.to(torch.bool),
    ):
        assert isinstance(same, SymbolicMask)
        assert same.mask == mask.mask
    assert torch.equal(mask[:, :, :, :2], dense[..., :2])
    assert torch.equal(~mask, ~dense)
    assert torch.equal(torch.where(mask, 1.0, 0.0), dense.float())
    assert torch.equal(mask.float(), dense.float())
    assert repr(mask) == "SymbolicMask(causal(), [2, 1, 3, 3])"
    with pytest.raises(RegardError, match="by hand cannot be watched"):
        _ = torch.zeros(2, 1, 3, 3) + mask
