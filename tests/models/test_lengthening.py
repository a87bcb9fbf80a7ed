"""A model that goes on learning from longer texts, and what is measured of it by position."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from models.train import causal, corpus, lengthen, positions, sample
from models.train.causal import IGNORED, Windows
from regard import RegardError, models
from regard.models.tokenizer import MARK
from tests.models.test_own_models import causal as causal_model
from tests.models.test_own_models import translator as translator_model
from tests.models.test_own_models import written
from tests.models.tiny import TEXTS, tokenizer, tokenizer_file

pytest.importorskip("tokenizers")


def streams() -> dict[str, torch.Tensor]:
    ids = corpus.encoded(tokenizer_file(), TEXTS)
    return {n + held: ids.clone() for n in lengthen.LONG for held in ("", ".held")}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    found = streams()
    for file, chosen in (("texts", ("books", "bibles")), ("stories", ("stories",))):
        kept = {n: ids for n, ids in found.items() if n.split(".")[0] in chosen}
        save_file(kept, tmp_path / f"{file}.safetensors")
    return tmp_path


def lengthened(data: Path, source: Path, *more: str) -> Path:
    out = data / "long"
    given = ["--source", str(source), "--data", str(data), "--out", str(out), "--device", "cpu"]
    few = ["--steps", "3", "--warmup", "1", "--every", "2", "--tokens", "192"]
    lengthen.main([*given, *few, *more])
    return out


def test_a_model_reads_more_than_before_and_says_how_well(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal, "PROMPTS", ("The cat",))
    model = causal_model()
    source, known = written(model, data / "model"), model.config.longest
    (source / "card.json").write_text(json.dumps({"name": "x", "licence": "y", "heads": {}}))
    out = lengthened(data, source, "--lengths", str(known), str(2 * known))
    reader = models.load(str(out), device="cpu")
    with torch.no_grad():
        assert reader.model(torch.ones(1, 2 * known, dtype=torch.int64)).shape[1] == 2 * known
    before, after = (load_file(f / "model.safetensors") for f in (source, out))
    moved = max(float((before[n].float() - after[n].float()).abs().max()) for n in before)
    assert 0 < moved < 3 * 3e-4 + 1e-3
    card = reader.card
    assert card["licence"] == "y"
    assert "heads" not in card
    facts = card["lengthened"]
    assert facts["training"]["steps"] == 3
    for table in facts["loss by position"].values():
        assert all(len(row) == 2 and min(row) > 0 for row in table.values())
        # What sees no further back than the text's beginning sees the same either way.
        assert math.isclose(table["all"][0], table[f"last {known}"][0], abs_tol=1e-3)


def test_each_step_reads_as_many_tokens_in_windows_of_one_length() -> None:
    device, found = torch.device("cpu"), streams()
    windows = {n: Windows(found, n, device) for n in (8, 16, 32)}
    lengths = lengthen.Lengths(windows, [0.2, 0.3, 0.5], 64)
    shapes = [tuple(lengths.draw(step, 0)[0].shape) for step in range(40)]
    assert {*shapes} == {(8, 8), (4, 16), (2, 32)}
    assert shapes == [tuple(lengths.draw(step, 0)[0].shape) for step in range(40)]


def test_near_losses_are_those_of_windows_read_alone() -> None:
    """Token by token: the window it belongs to, read by itself."""
    torch.manual_seed(0)
    model, known, n = causal_model(), 8, 24
    ids = torch.randint(1, model.config.vocabulary, (2, n))
    inputs = torch.cat([torch.full_like(ids[:, :1], MARK), ids[:, :-1]], 1)
    labels = ids.clone()
    labels[:, 0] = IGNORED
    found = positions.near_losses(model, inputs, labels, known)
    assert found.shape == (2, n)
    assert found[:, 0].isnan().all()
    for t in range(1, n):
        start = 0 if t < known else (t - known // 2) // (known // 2) * (known // 2)
        seen = inputs[:, start : t + 1].clone()
        seen[:, 0] = MARK
        assert known // 2 <= t - start < known or t < known
        with torch.no_grad():
            loss = cross_entropy(model(seen)[:, -1], ids[:, t], reduction="none")
        torch.testing.assert_close(found[:, t], loss, atol=1e-4, rtol=1e-4)
    whole = positions.token_losses(model, inputs, labels)
    torch.testing.assert_close(whole[:, 1:known], found[:, 1:known])
    assert not torch.allclose(whole[:, known:], found[:, known:], atol=1e-3)


def test_far_repeats_count_what_was_said_before() -> None:
    class Copier(torch.nn.Module):
        """Knows the period, and nothing else."""

        config = causal_model().config

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            period = ids.shape[1] // 2
            logits = torch.zeros(*ids.shape, self.config.vocabulary)
            follows = ids[:, 1 : ids.shape[1] - period + 1]
            logits[:, period:].scatter_(2, follows[..., None], 50.0)
            return logits

    windows = Windows(streams(), 128, torch.device("cpu"))
    found = positions.far_repeats(Copier(), windows)  # type: ignore[arg-type]
    assert found == {"64": 0.0, "32": 0.0}


def test_what_cannot_be_lengthened_is_refused(data: Path) -> None:
    source = written(causal_model(), data / "model")
    with pytest.raises(RegardError, match="at least one length above"):
        lengthened(data, source, "--lengths", "8")
    other = written(translator_model(), data / "other")
    with pytest.raises(RegardError, match="only a causal model can be lengthened"):
        lengthened(data, other, "--lengths", "4096")


def test_a_teacher_in_bytes_is_the_teacher_within_half_a_step() -> None:
    w = (
        torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-3, 2, 6)[:, None]
    )
    again = sample.from_bytes(sample.to_bytes({"w": w, "norm": w[0]}))
    assert torch.equal(again["norm"], w[0])
    assert ((again["w"] - w).abs() <= w.abs().amax(1, keepdim=True) / 253).all()
    assert sample.from_bytes({"w": w})["w"] is w


def test_texts_are_encoded_alike_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    made = corpus.encoded(tokenizer_file(), TEXTS)
    monkeypatch.setattr(corpus, "find_spec", lambda _: None)
    assert torch.equal(corpus.encoded(tokenizer_file(), TEXTS), made)
    assert tokenizer().decode(made.tolist()) == "".join(TEXTS)
