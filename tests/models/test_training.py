"""Training, small: the loss goes down, a seed gives the same weights, a stopped run goes on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from models.train import causal, corpus, heads, sample, translate
from models.train.training import Training, options
from regard import RegardError, interpret, models
from regard.interpret.head_scores.tables.badge_rules import RULES
from regard.models import CausalConfig, CausalModel, OwnReader, OwnTranslator
from regard.models.tokenizer import MARK
from tests.models.test_own_models import causal as causal_model
from tests.models.test_own_models import translator as translator_model
from tests.models.test_own_models import written
from tests.models.tiny import TEXTS, tokenizer, tokenizer_file

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.usefixtures("plain_products")
CLOSE: dict[str, Any] = {"atol": 6e-4, "rtol": 0}
"""Scores are rounded to three places."""
SENTENCES = translate.SENTENCES[:1]
SIZES = ["--d-model", "32", "--layers", "2", "--heads", "4", "--device", "cpu", "--every", "5"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small wait for threads longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What prepare.py leaves, from a few sentences."""
    from safetensors.torch import save_file

    for module in (causal, translate, heads):
        monkeypatch.setattr(module, "DATA", tmp_path)
    # Writing samples takes longer than training.
    monkeypatch.setattr(translate, "SENTENCES", ())
    file = tokenizer_file()
    for name in ("small", "king-james"):
        (tmp_path / f"{name}-tokenizer.json").write_text(file.read_text())
    ids = corpus.encoded(file, TEXTS)
    names = ("books", "bibles", "stories")
    small = {n + held: ids.clone() for n in names for held in ("", ".held")}
    save_file(
        {n: t for n, t in small.items() if "stories" not in n}, tmp_path / "small.safetensors"
    )
    save_file({n: t for n, t in small.items() if "stories" in n}, tmp_path / "stories.safetensors")
    (tmp_path / "told.json").write_text(json.dumps(TEXTS[:2]))
    rows = corpus.batches(file, TEXTS)
    kept = {}
    for name in ("learned", "held"):
        for side in ("source", "target"):
            kept[f"{name}.{side}"] = torch.tensor([i for r in rows for i in r]).short()
            kept[f"{name}.{side}.lengths"] = torch.tensor([len(r) for r in rows]).short()
    save_file(kept, tmp_path / "king-james.safetensors")
    return tmp_path


def train(script: Any, out: Path, *more: str, steps: int = 20) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    given = [*SIZES, "--longest", "48", "--steps", str(steps), "--batch", "8", "--warmup", "3"]
    script.main([*given, "--dropout", "0", "--out", str(out), *more])
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize(
    ("script", "name", "most"), [(causal, "regard-small", 4.0), (translate, "king", 4.5)]
)
def test_a_model_is_trained_written_measured_and_read(
    data: Path,
    script: Any,
    name: str,
    most: float,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = data / name
    monkeypatch.setattr(translate, "SENTENCES", SENTENCES)
    train(script, out, "--rate", "1e-2", steps=40)
    card = json.loads((out / "card.json").read_text())
    # log 320 is 5.8: what knowing nothing costs.
    assert all(loss < most for loss in card["loss"].values())
    assert card["training"]["steps"] == 40
    heads.main([str(out), "--device", "cpu"])
    reader = models.load(str(out), device="cpu")
    assert reader.card["licence"] == "Apache-2.0"
    kinds = {"previous", "first", "induction"} if script is causal else {"alignment", "end"}
    assert set(reader.card["heads"]) == kinds
    badges = [word for row in reader.card["badges"].values() for word in row]
    assert len(badges) == 4 * len(reader.card["badges"])
    assert {*badges} <= {"", *RULES}
    scores = torch.tensor([s for table in reader.card["scores"].values() for s in table])
    assert scores.shape == (2 * len(kinds), 4)
    assert ((scores >= 0) & (scores <= 1)).all()
    assert isinstance(reader.generate("The cat", 5, temperature=0), str)
    said = capsys.readouterr().out
    assert "held out:" in said
    assert script is causal or f"\n{SENTENCES[0]}\n" in said


@pytest.mark.parametrize("script", [causal, translate])
def test_a_seed_gives_the_same_weights(data: Path, script: Any) -> None:
    runs = [train(script, data / str(i), "--seed", s, steps=3) for i, s in enumerate("001")]
    assert all(torch.equal(w, runs[1][name]) for name, w in runs[0].items())
    assert any(not torch.equal(w, runs[2][name]) for name, w in runs[0].items())


@pytest.mark.parametrize("script", [causal, translate])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    data: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(script, data / "whole", "--dropout", "0.1", steps=6)
    own = Training._step

    def failing(self: Training, loss_of: Any) -> Tensor:
        if self.done == 5:
            raise KeyboardInterrupt
        return own(self, loss_of)

    more = ("--dropout", "0.1", "--save-every", "3")
    with monkeypatch.context() as patched:
        patched.setattr(Training, "_step", failing)
        with pytest.raises(KeyboardInterrupt):
            train(script, data / "parts", *more, steps=6)
    parts = train(script, data / "parts", *more, "--resume", steps=6)
    assert all(torch.equal(w, parts[name]) for name, w in whole.items())


def training(tmp_path: Path, *given: str) -> Training:
    parser = argparse.ArgumentParser()
    options(parser, batch=1, rate=1.0, out=tmp_path)
    model = CausalModel(CausalConfig(8, 4, 1, 1, 8))
    return Training(model, parser.parse_args(["--every", "1000", *given]))


def test_the_rate_goes_up_and_down(tmp_path: Path) -> None:
    run = training(tmp_path, "--steps", "30", "--warmup", "10")
    rates = []
    for run.done in range(30):
        rates.append(run.rate())
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.05 < rates[-1] < 0.06


def test_minutes_become_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = training(tmp_path, "--minutes", "0.02", "--warmup", "4")
    run.run(lambda step: sum(p.sum() ** 2 for p in run.model.parameters()), dict)  # type: ignore[arg-type,return-value]
    assert "steps fit" in capsys.readouterr().out
    assert run.steps is not None
    assert 4 < run.done <= run.steps
    assert run.seconds < 5
    # With that number of steps it is the same run again, and its rates the same.
    again = training(tmp_path, "--steps", str(run.steps), "--warmup", "4")
    again.done = run.done = run.steps - 1
    assert again.rate() == run.rate()


@pytest.mark.parametrize("given", [(), ("--steps", "3", "--minutes", "1")])
def test_a_budget_is_needed(tmp_path: Path, given: tuple[str, ...]) -> None:
    with pytest.raises(RegardError, match="--steps N or --minutes M"):
        training(tmp_path, *given)


def windows(size: int = 16) -> causal.Windows:
    ids = corpus.encoded(tokenizer_file(), TEXTS)
    names = [n + held for n in causal.SHARES for held in ("", ".held")]
    return causal.Windows(dict.fromkeys(names, ids), size, torch.device("cpu"))


def test_windows_are_text_behind_a_mark_and_what_follows() -> None:
    inputs, labels = windows().draw(0, 64, 0)
    assert inputs.shape == labels.shape == (64, 16)
    assert (inputs[:, 0] == MARK).all()
    assert (labels[:, 0] == causal.IGNORED).all()
    learned = labels[:, :-1] != causal.IGNORED
    assert (inputs[:, 1:] == labels[:, :-1])[learned].all()
    whole = tokenizer().decode(corpus.encoded(tokenizer_file(), TEXTS).tolist())
    texts = [tokenizer().decode(row[1:].tolist()) for row in inputs]
    assert sum(text in whole for text in texts) >= 55
    other, _ = windows().draw(1, 64, 0)
    assert not torch.equal(inputs, other)


def test_repeated_windows_ask_for_what_was_said_before() -> None:
    inputs, labels = windows(64)._repeated(torch.Generator().manual_seed(0))
    asked = labels != causal.IGNORED
    period = int(asked.int().argmax()) - 1
    assert 4 <= period < 32
    assert torch.equal(inputs[1 + period :], inputs[1:-period])
    assert torch.equal(labels[period + 1 :], labels[asked])


def test_heads_are_scored_by_what_stands_where(data: Path) -> None:
    """Each score again, from the tokens themselves."""
    reader = models.load(str(written(causal_model(), data / "model")), device="cpu")
    assert isinstance(reader, OwnReader)
    scores = heads.causal_scores(interpret.heads(reader, [TEXTS[0]], random=False))
    weights = [layer.trace.weights()[0] for layer in reader.run(TEXTS[0]).values()]
    n = weights[0].shape[1]
    assert 20 < n < reader.model.config.longest
    for i, w in enumerate(weights):
        previous = sum(w[:, q, q - 1] for q in range(1, n)) / (n - 1)
        torch.testing.assert_close(torch.tensor(scores["previous"][i]), previous, **CLOSE)
        torch.testing.assert_close(torch.tensor(scores["first"][i]), w[:, :, 0].mean(1), **CLOSE)
    best = heads.strongest(scores, 1)["induction"][0]
    assert best["score"] == max(max(row) for row in scores["induction"])
    assert scores["induction"][best["layer"]][best["head"]] == best["score"]


def test_alignment_is_scored_where_a_word_stands_once(data: Path) -> None:
    reader = models.load(str(written(translator_model(), data / "model")), device="cpu")
    assert isinstance(reader, OwnTranslator)
    kept = {
        "held.source": torch.tensor([5, 6, 7, 6]), "held.source.lengths": torch.tensor([4]),
        "held.target": torch.tensor([7, 6, 9, 5]), "held.target.lengths": torch.tensor([4]),
    }  # fmt: skip
    pairs = translate.Pairs(kept, "held", 48, torch.device("cpu"))
    scores = heads.translator_scores(reader, pairs)
    with torch.no_grad(), regard.watch(reader.model, keep="traces") as seen:
        reader.model(torch.tensor([[5, 6, 7, 6, MARK]]), torch.tensor([[MARK, 7, 6, 9, 5]]))
    for i in range(2):
        w = seen[f"decoder.{i}.memory"].trace.weights()[0]
        # 7 is written first and stands third; 6 stands twice, 9 not at all; 5 stands first.
        aligned, end = (w[:, 0, 2] + w[:, 3, 0]) / 2, w[:, :, 4].mean(1)
        torch.testing.assert_close(torch.tensor(scores["alignment"][i]), aligned, **CLOSE)
        torch.testing.assert_close(torch.tensor(scores["end"][i]), end, **CLOSE)


def test_stories_end_where_they_end() -> None:
    pieces = ["", "<s>", "</s>", " Tom", " ran", ".", '"', "<0xC3>", "<0xA9>", "<0x0A>"]
    long = [3, 4, 5] * 30
    told = torch.tensor([[*long, 1, 3, 3, 3], [*long, 7, 8, 5, 4], [3, 4, 5, 2, *long]])
    found = list(sample.texts(told, pieces))
    assert found == [(" Tom ran." * 30).strip(), (" Tom ran." * 30).strip() + "é."]


def test_a_teller_with_a_cache_is_one_that_reads_all() -> None:
    torch.manual_seed(0)
    d, heads_, hidden, vocabulary = 16, 2, 24, 40
    weights = {"model.embed_tokens.weight": torch.randn(vocabulary, d)}
    for i in range(2):
        at = f"model.layers.{i}."
        for name in "qkvo":
            weights[f"{at}self_attn.{name}_proj.weight"] = torch.randn(d, d) / 4
        for name, shape in (("gate", (hidden, d)), ("up", (hidden, d)), ("down", (d, hidden))):
            weights[f"{at}mlp.{name}_proj.weight"] = torch.randn(*shape) / 4
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = torch.ones(d)
    weights["model.norm.weight"] = torch.ones(d)
    teller = sample.Teller(weights, heads_, torch.device("cpu"), torch.float32)
    told = teller.tell(3, 12, torch.Generator().manual_seed(0), floor=0.999)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=d, intermediate_size=hidden, num_hidden_layers=2,
        num_attention_heads=heads_, rms_norm_eps=1e-5, tie_word_embeddings=True,
        pad_token_id=None, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    ids = torch.cat([torch.ones(3, 1, dtype=torch.long), told], 1)
    with torch.no_grad():
        likeliest = model(ids[:, :-1]).logits.argmax(-1)
    # With so high a floor only the likeliest is left to draw.
    assert torch.equal(likeliest, told)
