"""attn_implementation="regard" and eager attention in the conditions that models run in: padding on
the left, packed sequences, caches of both kinds, prompts in parts, encoders with padding."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.errors import RegardWarning

transformers = pytest.importorskip("transformers")

from regard.watching.huggingface.mask_maker import make_mask  # noqa: E402
from regard.watching.huggingface.symbolic_mask import SymbolicMask  # noqa: E402
from tests.watching.huggingface.test_by_name import both, close  # noqa: E402
from tests.watching.huggingface.test_huggingface import (  # noqa: E402
    BY_HAND,
    DECODERS,
    IMAGE,
    OTHERS,
    TEXT,
    enlivened,
    inputs,
    padded,
    random,
    tokens,
)

PACKED = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
LEFT = padded(9, 5, left=True)


def places(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


def given_for(condition: str) -> dict[str, Tensor]:
    if condition == "packed":
        return {"input_ids": tokens(), "position_ids": PACKED}
    return {"input_ids": tokens(), "attention_mask": LEFT, "position_ids": places(LEFT)}


@pytest.mark.parametrize("condition", ["left padding", "packed"])
@pytest.mark.parametrize("family", DECODERS)
def test_training(family: str, condition: str) -> None:
    eager, ours = both(family)
    given = given_for(condition)
    real = given.get("attention_mask", torch.ones(2, 9)).bool()
    want, got = (model(**given, use_cache=False).logits[real] for model in (eager, ours))
    close(got, want)
    pull = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    for answer in (want, got):
        (answer * pull).sum().backward()
    grads = {path: p.grad for path, p in eager.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for path, p in ours.named_parameters():
        if path in grads:
            close(p.grad, grads[path], times=10, largest=largest)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_prompt_in_parts_and_then_a_token(family: str, cache: str) -> None:
    """Caches that hold more keys than there are queries, and static ones with room left over;
    windows of 4 have let keys go by then."""
    answers = []
    for model in both(family):
        held = (
            transformers.DynamicCache(config=model.config)
            if cache == "dynamic"
            else transformers.StaticCache(config=model.config, max_cache_len=12)
        )
        ids, found = tokens(), []
        for start, end in ((0, 5), (5, 8), (8, 9)):
            given: dict[str, Any] = {"input_ids": ids[:, start:end], "past_key_values": held}
            given |= {"attention_mask": LEFT[:, :end], "position_ids": places(LEFT)[:, start:end]}
            with torch.no_grad():
                found.append(model(**given, use_cache=True).logits)
        answers.append(torch.cat(found, 1)[LEFT.bool()])
    close(answers[1], answers[0], times=2)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", [f for f in OTHERS if f in ("t5", "bart", "whisper")])
def test_what_is_generated_after_an_encoder(family: str, cache: str) -> None:
    eager, ours = both(family)
    given = {n: x for n, x in inputs(eager, family).items() if not n.startswith("decoder")}
    how = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    kind = {} if cache == "dynamic" else {"cache_implementation": "static"}
    want = eager.generate(**given, **how, output_logits=True)
    got = ours.generate(**given, **how, **kind, output_logits=True, disable_compile=True)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(want.logits, got.logits, strict=True):
        close(b, a, times=4)


OLD = {
    "codegen": ("CodeGenForCausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "xglm": ("XGLMForCausalLM", {
        "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48,
    }),
    "bloom": BY_HAND["bloom"],
}  # fmt: skip


def by_hand(family: str, **changes: Any) -> list[Any]:
    name, sizes = OLD[family]
    kind = getattr(transformers, name)
    few = {key: TEXT[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    given = few | sizes | changes
    return [
        enlivened(kind._from_config(kind.config_class(**given), attn_implementation=name))
        for name in ("eager", "regard")
    ]


@pytest.mark.parametrize("family", OLD)
def test_attention_by_hand_stays_what_it_is(family: str) -> None:
    from regard.watching.huggingface import by_name

    eager, ours = by_hand(family)
    by_name._warn_once.cache_clear()
    given = {"input_ids": tokens(), "attention_mask": LEFT}
    with torch.no_grad():
        with pytest.warns(RegardWarning, match=r"changes nothing in models of \w+.* by hand"):
            got = ours(**given).logits
        assert torch.equal(got, eager(**given).logits)
        assert torch.equal(ours(**given).logits, got)  # it is said once


@pytest.mark.compiled
def test_attention_by_hand_stays_so_in_a_graph() -> None:
    eager, ours = by_hand("codegen", n_layer=1)
    given = {"input_ids": tokens(), "attention_mask": LEFT}
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        close(compiled(**given).logits, eager(**given).logits)


BEFORE: dict[str, tuple[str, dict[str, Any]]] = {
    "minimax": ("MiniMaxForCausalLM", TEXT | {
        "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"],
        "block_size": 4, "num_local_experts": 2,
    }),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "lru_width": 32, "attention_window_size": 4,
    }),
}  # fmt: skip


@pytest.mark.parametrize("family", BEFORE)
def test_a_mask_of_one_key_is_for_all_keys(family: str) -> None:
    """Where other layers stand before those of attention, transformers finds no key in a cache."""
    name, sizes = BEFORE[family]
    kind = getattr(transformers, name)
    eager, ours = (
        enlivened(kind._from_config(kind.config_class(**sizes), attn_implementation=how))
        for how in ("eager", "regard")
    )
    ours.load_state_dict(eager.state_dict())
    how = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    want, got = (
        model.generate(tokens(), **how, output_logits=True, pad_token_id=0, eos_token_id=None)
        for model in (eager, ours)
    )
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(want.logits, got.logits, strict=True):
        close(b, a, times=4)
    with regard.watch(eager, keep="traces", layers="*layers.[12].*") as seen:
        watched = eager.generate(tokens(), **how, pad_token_id=0, eos_token_id=None)
    assert torch.equal(watched.sequences, want.sequences)
    (layer,) = seen.values()
    weights = layer.traces[-1].weights()
    assert bool((weights > 0).all())
    close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def attend(*shapes: int, mask: Tensor | None = None, **how: Any) -> Tensor:
    from regard.watching.huggingface import by_name

    q, k = (torch.randn(b, 2, 5, 4, generator=torch.Generator().manual_seed(b)) for b in shapes)
    out: Tensor = by_name.attend_by_name(torch.nn.Module(), q, k, k, mask, **how)[0]
    weights = q @ k.mT / 2
    if mask is not None:
        weights = weights.masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(out, (weights.softmax(-1) @ k).transpose(1, 2))
    return out


def test_booleans_that_say_what_is_padding_may_be_written_to() -> None:
    """By NumPy too, which nobody counts."""
    eager, ours = both("llama")
    real = LEFT.bool()
    for row in (0, 1, 0):
        real.numpy()[row, :3] ^= True
        with torch.no_grad():
            want, got = (model(tokens(), attention_mask=real).logits for model in (eager, ours))
        close(got[real], want[real])


def test_queries_that_a_batch_shares() -> None:
    """As those that Granite learns to ask speech with."""
    assert attend(1, 3).shape == (3, 5, 2, 4)


def test_one_row_of_a_mask_for_all_queries() -> None:
    """As BridgeTower gives its words."""
    mask = make_mask(2, 1, 5, 4, attention_mask=padded(5, 3, n=5), config=None)
    assert isinstance(mask, SymbolicMask)
    attend(2, 2, mask=mask)


@pytest.mark.parametrize("name", ["labels", "logits_to_keep", "pixel_values"])
def test_arguments_of_the_whole_model_are_passed_over(name: str) -> None:
    """As LLaVA hands them down to each layer."""
    attend(2, 2, **{name: torch.ones(1)})


@pytest.mark.parametrize("how", ["by name", "watched"])
def test_models_that_join_masks_get_masks_that_are_added(how: str) -> None:
    """DeepSeek V4 lets queries see compressed keys, for which it puts zeros beside the mask: in a
    boolean one they would be hidden. transformers takes no "sdpa" for it."""
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("transformers does not have the family")
    config = transformers.DeepseekV4Config(
        vocab_size=200, hidden_size=32, num_attention_heads=4, num_key_value_heads=1,
        num_hidden_layers=1, num_experts_per_tok=2, moe_intermediate_size=16,
        max_position_embeddings=64, head_dim=16, partial_rotary_factor=0.5, q_lora_rank=16,
        o_groups=2, o_lora_rank=8, n_routed_experts=4, n_shared_experts=1, mlp_layer_types=["moe"],
        layer_types=["compressed_sparse_attention"], sliding_window=8, hc_mult=4,
        hc_sinkhorn_iters=3, index_n_heads=2, index_head_dim=16, index_topk=2,
        num_nextn_predict_layers=0,
    )  # fmt: skip
    torch.manual_seed(0)
    eager, ours = (
        transformers.DeepseekV4Model._from_config(deepcopy(config), attn_implementation=name)
        for name in ("eager", "regard" if how == "by name" else "eager")
    )
    ours.eval().load_state_dict(enlivened(eager).state_dict())
    with torch.no_grad():
        want = eager(input_ids=tokens()).last_hidden_state
        with regard.watch(ours) if how == "watched" else nullcontext():
            got = ours(input_ids=tokens()).last_hidden_state
    close(got, want)


def test_a_text_model_by_hand_beside_an_image_model_that_is_not() -> None:
    """GIT: the file of both speaks of transformers' interface, which its text model does not
    use."""
    config = transformers.GitConfig(**TEXT, vision_config=IMAGE)
    model = enlivened(transformers.GitForCausalLM._from_config(config, attn_implementation="eager"))
    given = {"input_ids": tokens(), "pixel_values": random(2, 3, 16, 16)}
    with torch.no_grad():
        want = model(**given, output_attentions=True)
        with regard.watch(model, keep="traces") as seen:
            got = model(**given).logits
    close(got, want.logits)
    paths = [path for path in seen if "image_encoder" not in path]
    assert len(paths) == len(want.attentions) == 2 < len(seen)
    for path, weights in zip(paths, want.attentions, strict=True):
        close(seen[path].trace.weights(), weights)
