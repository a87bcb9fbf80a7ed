"""Head scores and attribution beside TransformerLens (below 3, which has its own models) and
captum, on the same weights. `make real` puts both beside what is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import interpret
from tests.interpret.constructed import Dense

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]
close = torch.testing.assert_close
IDS = torch.randint(1, 40, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """A GPT-2 of transformers, and the same weights in TransformerLens."""
    lens = pytest.importorskip("transformer_lens")
    weights = pytest.importorskip("transformer_lens.pretrained.weight_conversions")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ours = GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=16, n_layer=3, n_head=4, n_positions=16)
    ).eval()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    config = lens.HookedTransformerConfig(
        n_layers=3, d_model=16, d_head=4, n_heads=4, n_ctx=16, d_vocab=40, act_fn="gelu_new",
        normalization_type="LN", device="cpu",
    )  # fmt: skip
    theirs = lens.HookedTransformer(config)
    theirs.load_state_dict(weights.convert_gpt2_weights(ours, config), strict=False)
    close(theirs(IDS), ours(IDS).logits, atol=1e-4, rtol=1e-4)
    return ours, theirs


@torch.no_grad()
def test_direct_logits(models: tuple[Any, Any]) -> None:
    ours, theirs = models
    found = interpret.direct_logits(ours, IDS, 3, 7).heads()
    _, cache = theirs.run_with_cache(IDS)
    written = cache.stack_head_results(pos_slice=-1)
    scaled = cache.apply_ln_to_stack(written, pos_slice=-1) * theirs.ln_final.w
    want = scaled @ (theirs.W_U[:, 3] - theirs.W_U[:, 7])
    got = torch.stack([part.values for part in found.parts]).float()
    close(got, want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_head_scores(models: tuple[Any, Any]) -> None:
    """Its detection patterns say which pairs belong to a kind of head."""
    ours, theirs = models
    detector = pytest.importorskip("transformer_lens.head_detector")
    words = torch.randperm(40, generator=torch.Generator().manual_seed(1))[None, :6]
    ids = torch.cat([words, words], 1)
    found = interpret.heads(ours, ids, probes=False, random=False)
    _, cache = theirs.run_with_cache(ids)
    of = {"previous": "previous_token", "duplicate": "duplicate_token", "induction": "induction"}
    for name, kind in of.items():
        pairs = getattr(detector, f"get_{kind}_head_detection_pattern")(ids)
        rows = pairs.any(-1).sum()
        want = [(cache["pattern", layer][0] * pairs).sum((-1, -2)) / rows for layer in range(3)]
        close(torch.tensor(found.grid(name)), torch.stack(want), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_norms_and_rollout(models: tuple[Any, Any]) -> None:
    ours, theirs = models
    _, cache = theirs.run_with_cache(IDS)
    found = interpret.attribute(ours, IDS, method="norms", queries=-1)
    mixed = torch.eye(9)
    for layer in range(3):
        pattern = cache["pattern", layer]
        written = torch.einsum(
            "bhk,bkhd,hdm->bhkm", pattern[:, :, -1], cache["v", layer], theirs.W_O[layer]
        )
        close(found.heads[f"transformer.h.{layer}.attn", 0], written.norm(dim=-1), atol=1e-4,
              rtol=1e-4)  # fmt: skip
        mixed = (pattern.mean(1) + torch.eye(9)) / 2 @ mixed
    rolled = interpret.attribute(ours, IDS, method="rollout")
    close(rolled.tokens, mixed[:, -1], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_compositions(models: tuple[Any, Any]) -> None:
    ours, theirs = models
    found = interpret.compositions(ours)
    for kind, scores in found.scores.items():
        want = theirs.all_composition_scores(kind)
        close(scores.nan_to_num().float(), want.float(), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_circuits(models: tuple[Any, Any]) -> None:
    ours, theirs = models
    for head in range(4):
        ov = theirs.W_E @ theirs.W_V[1, head] @ theirs.W_O[1, head] @ theirs.W_U
        eigen = torch.linalg.eigvals(ov.double())
        want = float(eigen.real.sum() / eigen.abs().sum())
        found = interpret.circuit(ours, 1, head, norms=False)
        assert abs(found.copying - want) < 1e-3
        qk = theirs.W_E @ theirs.W_Q[1, head] @ theirs.W_K[1, head].T @ theirs.W_E.T / 2
        assert abs(found.looks[0].score - float(qk.max())) < 1e-3


def test_integrated_gradients() -> None:
    """captum integrates over n×n patterns that are its inputs."""
    captum = pytest.importorskip("captum.attr")
    torch.manual_seed(0)
    model, x = Dense().double().eval(), torch.randn(1, 7, 32, dtype=torch.float64)

    def metric(output: Tensor) -> Tensor:
        return output[:, -1].tanh().sum(-1)

    def of_patterns(*patterns: Tensor) -> Tensor:
        many = len(patterns[0])
        return metric(
            model.dense(x.expand(many, -1, -1), after=lambda i, _, __, v: patterns[i] @ v)[0]
        )

    patterns = tuple(had["p"].detach() for had in model.dense(x)[1])
    want = captum.IntegratedGradients(of_patterns).attribute(patterns, n_steps=8)
    found = interpret.attribute(model, x, metric, method="integrated", steps=8, queries=range(7))
    for i in range(3):
        close(found.rows[f"layers.{i}", 0], want[i])
