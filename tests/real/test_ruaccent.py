"""A trained nn.Transformer: where the stress falls in Russian words, letter by letter."""

from __future__ import annotations

import copy
import io
import json
import math

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import interpret
from tests.real.agreement import agree, torch_weights
from tests.real.packages import RUACCENT

pytestmark = pytest.mark.real
SAID, STRESSED = "мама мыла раму", "ма'ма мы'ла ра'му"
LENGTH = 256


class Stress(nn.Module):
    """The model whose weights are in the package."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed = nn.Module()
        self.embed.char_embed = nn.Embedding(letters, 256, padding_idx=0)
        self.embed.register_buffer("pos_encoding", torch.zeros(1, LENGTH, 256))
        self.transformer = nn.Transformer(256, 8, 4, 4, 1024, batch_first=True)
        self.output_proj = nn.Linear(256, letters)

    def embedded(self, letters: Tensor) -> Tensor:
        x: Tensor = self.embed.char_embed(letters) * math.sqrt(256)
        return x + self.embed.pos_encoding[:, : letters.shape[1]]

    def forward(self, source: Tensor, written: Tensor) -> Tensor:
        n = written.shape[1]
        x, y = self.embedded(source), self.embedded(written)
        future = torch.full((n, n), -torch.inf, dtype=y.dtype).triu(1)
        out = self.transformer(x, y, tgt_mask=future)
        logits: Tensor = self.output_proj(out)
        return logits


@pytest.fixture(scope="module")
def letters() -> dict[str, int]:
    found: dict[str, int] = json.loads(RUACCENT.read("ruaccent/model/vocab.json"))
    return found


@pytest.fixture(scope="module")
def model(letters: dict[str, int]) -> Stress:
    made = Stress(len(letters)).eval()
    data = RUACCENT.read("ruaccent/model/acc_model.pt")
    made.load_state_dict(torch.load(io.BytesIO(data), "cpu", weights_only=True))
    return made


@pytest.fixture(scope="module")
def source(letters: dict[str, int]) -> Tensor:
    ids = [letters["<s>"], *(letters[c] for c in SAID), letters["</s>"]]
    return torch.tensor([ids + [letters["<pad>"]] * (LENGTH - len(ids))])


@pytest.fixture(scope="module")
def written(letters: dict[str, int]) -> Tensor:
    return torch.tensor([[letters["<s>"], *(letters[c] for c in STRESSED)]])


@torch.no_grad()
def test_the_stress_is_put_right_while_watched(
    model: Stress, source: Tensor, letters: dict[str, int]
) -> None:
    signs, text = {number: c for c, number in letters.items()}, [letters["<s>"]]
    with regard.watch(model) as seen:
        for _ in STRESSED:
            text.append(int(model(source, torch.tensor([text]))[0, -1].argmax()))
    assert "".join(signs[i] for i in text[1:]) == STRESSED
    assert len(seen) == 4 + 2 * 4


@torch.no_grad()
def test_weights_and_logits_are_those_of_torch(
    model: Stress, source: Tensor, written: Tensor
) -> None:
    doubled = copy.deepcopy(model).double()
    plain = torch_weights(model, lambda: model(source, written))
    exact = torch_weights(doubled, lambda: doubled(source, written))
    with regard.watch(model, keep="traces") as seen:
        got = model(source, written)
    agree(got, model(source, written), doubled(source, written))
    assert sorted(plain) == sorted(seen)
    for path, layer in seen.items():
        agree(layer.trace.weights(), plain[path], exact[path])


@torch.no_grad()
def test_each_letter_is_found_where_it_was_read(
    model: Stress, source: Tensor, written: Tensor
) -> None:
    with regard.watch(model, keep="traces") as seen:
        model(source, written)
    every = [(layer, head) for layer in range(4) for head in range(8)]
    times = interpret.token_times(
        seen, len(STRESSED), every, layers="*.multihead_attn", prompt=1, frames=2 + len(SAID),
        smooth=1, seconds=1.0,
    )  # fmt: skip
    found = [int(t) for t, sign in zip(times[:, 0], STRESSED, strict=True) if sign != "'"]
    # Letter i stands at place i + 1, after the mark of the beginning, where every path begins.
    assert found == [0, *range(2, len(SAID) + 1)]
