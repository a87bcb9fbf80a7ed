"""A trained nn.TransformerEncoder: Uzbek words, letter by letter."""

from __future__ import annotations

import copy
import io
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from tests.real.agreement import agree, torch_weights
from tests.real.packages import UZMORPH

LENGTH = 30


class Morphology(nn.Module):
    """The model whose weights are in the package."""

    def __init__(self, letters: int, tags: int) -> None:
        super().__init__()
        place, step = torch.arange(50.0)[:, None], torch.arange(0, 128, 2)
        turns = place * torch.exp(step * (-math.log(10_000.0) / 128))
        self.embedding = nn.Embedding(letters, 128)
        self.pos_encoder = nn.Module()
        self.pos_encoder.register_buffer(
            "pe", torch.stack([turns.sin(), turns.cos()], 2).view(1, 50, 128)
        )
        layer = nn.TransformerEncoderLayer(128, 8, 256, batch_first=True)
        self.transformer_encoder = nn.TransformerEncoder(layer, 3)
        self.decoder = nn.Linear(128, tags)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.embedding(letters) + self.pos_encoder.pe[:, : letters.shape[1]]
        return self.decoder(self.transformer_encoder(x))


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    names = ("char_vocab", "tag_vocab")
    return {
        name: json.loads(UZMORPH.read(f"uzmorph_transformer/data/{name}.json")) for name in names
    }


@pytest.fixture(scope="module")
def model(known: dict[str, Any]) -> Morphology:
    data = UZMORPH.read("uzmorph_transformer/data/morph_transformer.pth")
    made = Morphology(len(known["char_vocab"]), len(known["tag_vocab"])).eval()
    made.load_state_dict(torch.load(io.BytesIO(data), "cpu", weights_only=True))
    return made


def spelled(known: dict[str, Any], *words: str) -> Tensor:
    letters = known["char_vocab"]
    return torch.tensor([[letters[c] for c in word] + [0] * (LENGTH - len(word)) for word in words])


@torch.no_grad()
def test_a_word_is_taken_apart_the_same_while_watched(
    model: Morphology, known: dict[str, Any]
) -> None:
    word = spelled(known, "kitoblarimizda")
    want = model(word)
    with regard.watch(model) as seen:
        got = model(word)
    agree(got, want, copy.deepcopy(model).double()(word))
    tags = {number: tag for tag, number in known["tag_vocab"].items()}
    read = [tags[int(i)] for i in got[0, : len("kitoblarimizda")].argmax(-1)]
    # kitob-lar-imiz-da: in our books
    assert ["ROOT" in tag for tag in read] == [True] * 5 + [False] * 9
    assert "NOUN" in read[5]
    assert "plural=1" in read[5]
    assert "Locative" in read[5]
    assert list(seen) == [f"transformer_encoder.layers.{i}.self_attn" for i in range(3)]


@torch.no_grad()
def test_weights_are_those_of_torch(model: Morphology, known: dict[str, Any]) -> None:
    words = spelled(known, "kitoblarimizda", "yozayapmiz", "olma")
    doubled = copy.deepcopy(model).double()
    plain = torch_weights(model, lambda: model(words))
    exact = torch_weights(doubled, lambda: doubled(words))
    with regard.watch(model, keep="traces") as seen:
        model(words)
    assert sorted(plain) == sorted(seen)
    for path, layer in seen.items():
        agree(layer.trace.weights(), plain[path], exact[path])
        # Trained heads choose: they are far from looking everywhere alike.
        assert (layer.entropy < 0.9 * math.log(LENGTH)).any()
