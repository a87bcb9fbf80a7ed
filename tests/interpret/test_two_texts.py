"""Models that read one text and write another, of the same length: that does not tell which."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, interpret
from regard.interpret.two_texts import texts_named

transformers = pytest.importorskip("transformers")
N = 7


@pytest.fixture(scope="module")
def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).double().eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(3, 40, (2, 1, N), generator=torch.Generator().manual_seed(0))


def logit(output: Any) -> Tensor:
    found: Tensor = output.logits[:, -1, 5]
    return found


@pytest.mark.parametrize("method", ["weights", "norms", "gradients", "integrated"])
@pytest.mark.parametrize("told", [True, False], ids=["both", "one"])
def test_tokens_of_two_texts_are_not_added_up(bart: Any, ids: Tensor, method: Any, told: bool):
    text = {"input_ids": ids[0]} | ({"decoder_input_ids": ids[1]} if told else {})
    metric = logit if method in ("gradients", "integrated") else None
    with pytest.raises(RegardError, match=r"(?s)look at the same ones.*keys of the decoder"):
        interpret.attribute(bart, text, metric, method=method, steps=2)


@pytest.mark.parametrize("method", ["rollout", "flow"])
@pytest.mark.parametrize("layers", ["*", "*.encoder_attn"])
def test_layers_that_mix_two_texts_are_not_multiplied(
    bart: Any, ids: Tensor, method: Any, layers: str
) -> None:
    text = {"input_ids": ids[0], "decoder_input_ids": ids[1]}
    with pytest.raises(RegardError, match=r"layers="):
        interpret.attribute(bart, text, method=method, layers=layers)


def test_faithfulness_is_that_of_one_text(bart: Any, ids: Tensor) -> None:
    text = {"input_ids": ids[0], "decoder_input_ids": ids[1]}
    with pytest.raises(RegardError, match="look at the same ones"):
        interpret.faithfulness(bart, [text], logit)


@pytest.mark.parametrize("layers", ["*encoder.*", "*decoder.*self_attn", "*.encoder_attn"])
def test_layers_of_one_kind_are_scored(bart: Any, ids: Tensor, layers: str) -> None:
    text = {"input_ids": ids[0], "decoder_input_ids": ids[1]}
    found = interpret.attribute(bart, text, method="weights", layers=layers)
    with torch.no_grad(), regard.watch(bart, keep="traces") as seen:
        bart(**text)
    (path,) = (place[0] for place in found.heads)
    torch.testing.assert_close(found.tokens, seen[path].traces[0].weights().sum((1, 2)))


def test_heads_of_a_decoder_whose_text_is_not_told_are_refused(bart: Any, ids: Tensor) -> None:
    """Such a model shifts the source by itself, and a row's own token is the one before."""
    with pytest.raises(RegardError, match=r"(?s)one text of two.*decoder_input_ids.*encoder"):
        interpret.heads(bart, [ids[0]], probes=False)
    encoder = interpret.heads(bart, [ids[0]], probes=False, layers="*encoder.*")
    both = {"input_ids": ids[0], "decoder_input_ids": ids[1]}
    same = interpret.heads(bart, [both], probes=False, layers="*encoder.*")
    for name in ("previous", "duplicate", "entropy"):
        values = [found.at(0, 1).scores[name].value for found in (encoder, same)]
        assert values[0] == pytest.approx(values[1], nan_ok=True)


@pytest.mark.parametrize(
    ("path", "sides"),
    [
        ("model.encoder.layers.0.self_attn", ("encoder", "encoder")),
        ("model.decoder.layers.0.self_attn", ("decoder", "decoder")),
        ("decoder.block.1.layer.1.EncDecAttention", ("decoder", "encoder")),
        ("decoder.bert.encoder.layer.0.crossattention.self", ("decoder", "encoder")),
        ("decoder.bert.encoder.layer.0.attention.self", ("decoder", "decoder")),
        ("decoder.layers.2.multihead_attn", ("decoder", "encoder")),
        ("transformer.h.0.attn", None),
    ],
)
def test_paths_name_the_texts(path: str, sides: tuple[str, str] | None) -> None:
    assert texts_named(path) == sides
