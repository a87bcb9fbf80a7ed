"""The models of this package: cached steps are whole ones, watching sees every layer, files keep
all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, masks, models
from regard.interpret.head_scores.texts.text_batches import Texts
from regard.models import (
    CausalConfig,
    CausalModel,
    OwnReader,
    OwnTranslator,
    TranslatorConfig,
    TranslatorModel,
)
from regard.models.folder import save
from regard.models.tokenizer import MARK
from tests.models.tiny import tokenizer_file

pytest.importorskip("tokenizers")
M = TypeVar("M", CausalModel, TranslatorModel)
TEXT = "The king said, Don't be afraid"


def causal() -> CausalModel:
    torch.manual_seed(0)
    model = CausalModel(CausalConfig(320, d_model=32, layers=3, heads=4, longest=48)).eval()
    return loud(model)


def translator() -> TranslatorModel:
    torch.manual_seed(0)
    model = TranslatorModel(TranslatorConfig(320, d_model=32, layers=2, heads=4, longest=48))
    return loud(model.eval())


def loud(model: M) -> M:
    """Weights large enough that what attention does decides the answer."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.3)
    return model


def written(model: CausalModel | TranslatorModel, folder: Path) -> Path:
    save(model, folder)
    shutil.copy(tokenizer_file(), folder / "tokenizer.json")
    return folder


@pytest.fixture
def reader(tmp_path: Path) -> OwnReader:
    (tmp_path / "small").mkdir()
    (tmp_path / "small/card.json").write_text(json.dumps({"licence": "Apache-2.0"}))
    made = models.load(str(written(causal(), tmp_path / "small")), device="cpu")
    assert isinstance(made, OwnReader)
    return made


@pytest.fixture
def two(tmp_path: Path) -> OwnTranslator:
    made = models.load(str(written(translator(), tmp_path / "two")), device="cpu")
    assert isinstance(made, OwnTranslator)
    return made


@pytest.mark.parametrize("made", [causal, translator])
def test_what_is_loaded_is_what_was_saved_and_nothing_is_drawn(made: Any, tmp_path: Path) -> None:
    model = made()
    folder, before = written(model, tmp_path / "model"), torch.get_rng_state()
    loaded = models.load(str(folder), device="cpu").model.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded[name], weight.half().float()), name


@torch.no_grad()
def test_steps_with_a_memory_are_the_whole_text() -> None:
    model, ids = causal(), torch.randint(1, 320, (2, 20), generator=torch.Generator())
    whole, memory = model(ids), model.memory()
    parts = [model(part, past_key_values=memory) for part in ids.split([7, 1, 1, 11], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)
    assert memory.get_seq_length() == 20


@torch.no_grad()
def test_a_token_does_not_see_those_after_it() -> None:
    model, ids = causal(), torch.randint(1, 320, (1, 20), generator=torch.Generator())
    other = ids.clone()
    other[:, 12:] = 5
    torch.testing.assert_close(model(ids)[:, :12], model(other)[:, :12])
    assert not torch.allclose(model(ids)[:, 12:], model(other)[:, 12:])


@torch.no_grad()
def test_generating_with_a_memory_is_generating_without() -> None:
    model, ids = causal(), torch.tensor([[MARK, 70, 71, 72]])
    told, plain = model.continued(ids, 30), ids
    for _ in range(30):
        plain = torch.cat([plain, model(plain)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(told, plain)
    assert len(told[0].unique()) > 5


def test_drawing_is_seeded_and_stops_at_a_mark() -> None:
    model, ids = causal(), torch.tensor([[MARK, 70]])
    drawn = [model.continued(ids, 20, temperature=1.0, seed=s)[0].tolist() for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    stop = drawn[0][9]
    told = model.continued(ids, 20, temperature=1.0, seed=0, stop=stop)[0].tolist()
    assert told == drawn[0][: drawn[0].index(stop, 2) + 1]


@torch.no_grad()
def test_padding_of_a_source_changes_nothing() -> None:
    model = translator()
    source, target = torch.tensor([[5, 6, 7, MARK]]), torch.tensor([[MARK, 9, 8]])
    longer = torch.cat([source, torch.full((1, 3), 11)], 1)
    alone = model(source, target)
    torch.testing.assert_close(model(longer, target, lengths=torch.tensor([4])), alone)
    assert not torch.allclose(model(longer, target), alone)


@torch.no_grad()
def test_translating_with_a_memory_is_translating_without() -> None:
    model, source = translator(), torch.tensor([[5, 6, 7, 80, MARK]])
    told = model.written(source, 25, mark=MARK)
    plain = torch.tensor([[MARK]])
    while plain.shape[1] < told.shape[1]:
        plain = torch.cat([plain, model(source, plain)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(told, plain)
    assert told.shape[1] == 26 or told[0, -1] == MARK
    assert not torch.equal(told, model.written(source.flip(1), 25, mark=MARK))


def test_a_reader_reads_runs_and_goes_on(reader: OwnReader) -> None:
    tokens = reader.read(TEXT)
    assert tokens[0] == "<text>"
    assert "".join(tokens[1:]) == TEXT
    seen = reader.run(TEXT)
    assert list(seen) == [f"blocks.{i}.attention" for i in range(3)]
    assert seen.tokens == tokens
    for layer in seen.values():
        assert layer.trace.mask == masks.causal()
        assert layer.trace.lse.shape == (1, 4, len(tokens))
    told = reader.generate(TEXT, 10, seed=3)
    assert told == reader.generate(TEXT, 10, seed=3)
    assert reader.generate(TEXT, 10, temperature=0) == reader.generate(TEXT, 10, temperature=0)
    assert reader.card["licence"] == "Apache-2.0"
    assert repr(reader).endswith("CausalModel, 0.0473 M parameters)")


def test_a_run_is_what_the_model_does(reader: OwnReader) -> None:
    seen = reader.run(TEXT, layers=["blocks.1.*"], keep="statistics")
    assert list(seen) == ["blocks.1.attention"]
    assert len(seen["blocks.1.attention"].traces) == 0
    with torch.no_grad(), regard.watch(reader.model, keep="traces") as whole:
        reader.model(reader.ids(TEXT))
    torch.testing.assert_close(
        seen["blocks.1.attention"].entropy, whole["blocks.1.attention"].entropy
    )


@torch.no_grad()
def test_a_watch_knows_that_steps_go_on_with_a_text(reader: OwnReader) -> None:
    ids, memory = reader.ids(TEXT), reader.model.memory()
    with regard.watch(reader.model, keep="traces", tokenizer=reader.tokenizer) as seen:
        reader.model(ids[:, :5], past_key_values=memory)
        reader.model(ids[:, 5:], past_key_values=memory)
    assert seen["blocks.0.attention"].steps == [0, 1]
    assert len(seen.tokens or []) == ids.shape[1]


def test_a_translator_reads_one_text_and_writes_another(two: OwnTranslator) -> None:
    text, target = "The cat sat.", "the daughter sat"
    source, rows = two.read(text), two.writes(target)
    assert source[-1] == rows[-1] == "<text>"
    assert "".join(source[:-1]) == text
    assert "".join(rows[:-1]) == target
    seen = two.run(text, target=target)
    assert sorted(seen) == [
        "decoder.0.memory", "decoder.0.own", "decoder.1.memory", "decoder.1.own",
        "encoder.0.attention", "encoder.1.attention",
    ]  # fmt: skip
    assert seen["decoder.1.memory"].trace.weights().shape == (1, 4, len(rows), len(source))
    assert seen["encoder.0.attention"].trace.mask is None
    assert seen.tokens is None
    assert two.writes(target, ended=False) == rows[:-1]
    cut = two.run(text, target=target, ended=False)["decoder.0.memory"].trace
    assert cut.lse.shape[2] == len(rows) - 1
    said = two.generate(text)
    again = two.run(text)["decoder.0.memory"].trace
    assert again.lse.shape[2] == min(len(two.tokenizer.encode(said)) + 1, 48)
    with pytest.raises(RegardError, match="not sampled"):
        two.generate(text, temperature=0.5)


def test_a_translation_that_does_not_end_is_read_as_far_as_it_can_be(two: OwnTranslator) -> None:
    text = "The cat sat."
    assert len(two.encode(two.generate(text))) + 2 > 49
    source, written = Texts(two, [text]).calls[0]
    assert torch.equal(source, two.ids(text))
    assert written.shape == (1, 48)
    assert torch.equal(written, two.own_targets(text)[:, :-1])
    two.model(source, written)


def test_weights_come_back_as_halves(tmp_path: Path) -> None:
    model = causal()
    made = models.load(str(written(model, tmp_path)), device="cpu")
    assert isinstance(made, OwnReader)
    for name, w in model.state_dict().items():
        back: Tensor = made.model.state_dict()[name]
        assert back.dtype == torch.float32
        assert torch.equal(back, w.half().float())
    assert made.model.config == model.config
    assert not made.model.training


def test_texts_that_are_too_long(reader: OwnReader, two: OwnTranslator) -> None:
    with pytest.raises(RegardError, match=r"longer than the model can read\n.*\n  accepted: 48"):
        reader.run("cat " * 60)
    with pytest.raises(RegardError, match="got:      53 tokens"):
        reader.generate("cat", 51)
    with pytest.raises(RegardError, match="longer than the model can read"):
        two.run("cat " * 60)
    with pytest.raises(RegardError, match="longer than the model can read"):
        two.run("cat", target="cat " * 60)


def test_folders_that_are_not_whole(tmp_path: Path) -> None:
    folder = written(causal(), tmp_path / "a")
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"layers": 2}))
    with pytest.raises(RegardError, match="the weights of the model cannot be read"):
        models.load(str(folder))
    (folder / "config.json").write_text(json.dumps(about | {"width": 2}))
    with pytest.raises(RegardError, match="unexpected keyword argument 'width'"):
        models.load(str(folder))
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "model.safetensors").write_bytes(b"half of it")
    with pytest.raises(RegardError, match="the weights of the model cannot be read"):
        models.load(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(RegardError, match="the weights of the model cannot be read"):
        models.load(str(folder))


def test_a_card_says_what_it_does_not_say() -> None:
    card = models.Card({"loss": {"stories": 1.23456}, "data": ["a", "b"]})
    assert repr(card) == "loss  stories 1.235\ndata  a; b"
    with pytest.raises(RegardError, match=r"nothing of 'licence'\n  accepted: loss, data"):
        card["licence"]
    assert repr(models.Card({})) == "Card(nothing known)"
