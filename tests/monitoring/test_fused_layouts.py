"""Projections that are named as others are and laid out in another order: QK-clip scales what makes
the logits, and the matrices of heads are those that the model multiplies with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import interpret
from regard.errors import RegardWarning
from regard.monitoring import QKClip

transformers: Any = pytest.importorskip("transformers")
SIZES = {"vocab_size": 40, "n_embd": 48, "n_head": 4, "n_layer": 1, "n_positions": 16,
         "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # fmt: skip
IDS = torch.randint(1, 40, (2, 9), generator=torch.Generator().manual_seed(0))
OTHERS = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1))


def made(family: str, **sizes: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{family}Model")(config)
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.3)
    return model.eval()


def deberta() -> nn.Module:
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1,
             "intermediate_size": 32, "vocab_size": 40}  # fmt: skip
    model = made("Deberta", **sizes)
    nn.init.normal_(model.get_parameter("encoder.layer.0.attention.self.q_bias"))
    return model


def crossed() -> nn.Module:
    return made("GPT2", **SIZES, add_cross_attention=True)


MADE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "GPT-2": (lambda: made("GPT2", **SIZES), "h.0.attn"),
    "GPT-2 cross": (crossed, "h.0.crossattention"),
    "BigCode": (lambda: made("GPTBigCode", **SIZES, multi_query=False), "h.0.attn"),
    "BigCode, one key head": (lambda: made("GPTBigCode", **SIZES), "h.0.attn"),
    "DeBERTa": (deberta, "encoder.layer.0.attention.self"),
}


def run(model: nn.Module) -> Any:
    crosses = hasattr(model.config, "add_cross_attention") and model.config.add_cross_attention
    return model(IDS, encoder_hidden_states=OTHERS) if crosses else model(IDS)


def logits(model: nn.Module, path: str) -> Tensor:
    with torch.no_grad(), regard.watch(model) as seen:
        run(model)
    return seen[path].max_logit


@pytest.mark.parametrize("name", MADE)
def test_qk_clip_scales_the_heads_that_passed_and_no_values(name: str) -> None:
    model, path = MADE[name][0](), MADE[name][1]
    before = logits(model, path)
    # Three of four heads pass: both of a pair, if somebody takes them for pairs.
    threshold = float(before.sort().values[:2].mean())
    assert threshold > 0
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        run(model)
    with regard.Monitor(model, every=1, rules=(), qk_clip=QKClip(threshold, layers=path)) as m:
        run(model)
        m.step()
    with torch.no_grad(), regard.watch(model, keep="traces") as again:
        run(model)
    torch.testing.assert_close(
        logits(model, path), before.clamp_max(threshold), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(seen[path].trace.inputs.v, again[path].trace.inputs.v)


def test_heads_in_four_parts_are_refused_and_left_as_they_are() -> None:
    model = made("CodeGen", **SIZES, rotary_dim=4)
    kept = {n: p.clone() for n, p in model.named_parameters()}
    with regard.Monitor(model, every=1, rules=(), qk_clip=1e-3) as m:
        run(model)
        with pytest.warns(RegardWarning, match="does not know where this module projects"):
            m.step()
    assert all(torch.equal(p, kept[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("name", [name for name in MADE if name != "DeBERTa"])
def test_matrices_of_heads_make_the_queries_keys_and_values(name: str) -> None:
    model, path = MADE[name][0](), MADE[name][1]
    read: list[Tensor] = []
    parts = dict(model.get_submodule(path).named_children())
    taken = [parts["q_attn"], parts["c_attn"]] if "q_attn" in parts else 2 * [parts["c_attn"]]
    hooks = [part.register_forward_pre_hook(lambda _, x: read.append(x[0])) for part in taken]
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        run(model)
    for hook in hooks:
        hook.remove()
    found, x = interpret.attribution.head_matrices(model, path), seen[path].trace.inputs
    for got, matrix, source in ((x.q, found.q, 0), (x.k, found.k, 1), (x.v, found.v, 1)):
        want = torch.einsum("bnm,hmd->bhnd", read[source], matrix)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
