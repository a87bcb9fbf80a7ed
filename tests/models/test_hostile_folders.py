"""Folders that say what is not so: nothing in them runs, waits or takes memory, and each is
refused with the reason."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import RegardError, models
from tests.models.test_own_models import causal, written
from tests.models.test_recorded_text import TEXT, Trap, write

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

from regard.models.huggingface_models import load_model


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def llama(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Where a pickle that is run leaves its mark.
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(sound, tmp_path / "llama"))


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where anything is given to the unpickler."""
    opened: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda *args, **how: opened.append(args))
    yield
    assert not opened


def said(folder: Path, **changes: Any) -> None:
    """Change what config.json says."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def indexed(folder: Path, name: str) -> None:
    """Weights that only an index names."""
    names = list(load_file(folder / "model.safetensors"))
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickle(path: Path) -> None:
    torch.save({"model.embed_tokens.weight": Trap()}, path)


@pytest.mark.usefixtures("unpickled")
@pytest.mark.parametrize("name", ["weights.bin", "weights.pt", "deep/weights.safetensors", "../x"])
def test_an_index_that_names_pickles_is_refused(name: str, llama: Path, tmp_path: Path) -> None:
    indexed(llama, name)
    (llama / "model.safetensors").rename(llama / "other.safetensors")
    (llama / "deep").mkdir()
    pickle(llama / name)
    with pytest.raises(
        RegardError, match=r"no safetensors weights|index of the weights"
    ) as refused:
        load_model(str(llama), device="cpu")
    assert name in str(refused.value)
    assert not (tmp_path / "pickle-was-run").exists()


@pytest.mark.usefixtures("unpickled")
def test_an_index_of_safetensors_is_read(llama: Path) -> None:
    indexed(llama, "part.safetensors")
    (llama / "model.safetensors").rename(llama / "part.safetensors")
    want = models.load(str(llama), device="cpu").run(TEXT)
    assert len(want) == 2


@pytest.mark.usefixtures("unpickled")
def test_weights_that_the_configuration_names_are_not_opened(llama: Path) -> None:
    said(llama, transformers_weights="adapter_model.bin")
    pickle(llama / "adapter_model.bin")
    assert load_model(str(llama), device="cpu").model is not None


def test_an_adapter_does_not_send_the_reader_elsewhere(llama: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(llama, tmp_path / "other"))
    adapter = {"base_model_name_or_path": str(other), "peft_type": "LORA"}
    (llama / "adapter_config.json").write_text(json.dumps(adapter))
    shutil.rmtree(other)
    assert load_model(str(llama), device="cpu").model is not None


@pytest.mark.parametrize("where", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize(
    "asked",
    ["nobody/kernel", "kernels-community/flash-attn", "flash_attention_2", "paged|nobody/k"],
)
def test_a_configuration_does_not_choose_the_attention(
    where: str, asked: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import modeling_utils

    fetched: list[Any] = []
    monkeypatch.setattr(
        modeling_utils, "lazy_import_flash_attention", lambda *args, **how: fetched.append(args)
    )
    said(llama, **{where: asked})
    model: Any = load_model(str(llama), device="cpu").model
    assert model.config._attn_implementation in ("sdpa", "eager")
    assert not fetched


def test_a_name_on_the_hub_is_held_to_the_same(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed(llama, "weights.bin")
    (llama / "model.safetensors").unlink()
    pickle(llama / "weights.bin")
    cache = tmp_path / "hub"
    place = cache / "models--nobody--bad"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    shutil.move(llama, place / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RegardError, match=r"no safetensors weights\n.*weights\.bin"):
        load_model("nobody/bad", device="cpu")


@pytest.mark.parametrize("part", ["half", "header", "nothing"])
def test_weights_that_are_cut_short_say_so(part: str, llama: Path) -> None:
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: {"half": len(whole) // 2, "header": 20, "nothing": 0}[part]])
    with pytest.raises(RegardError, match=r"model\.safetensors: .*\n.*may have been cut short"):
        load_model(str(llama), device="cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": 1000, "num_key_value_heads": 7},
        {"hidden_size": -1},
        {"hidden_size": "wide"},
        {"hidden_size": None},
        {"vocab_size": 1 << 40},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -3},
        {"hidden_act": "no such thing"},
        {"rope_parameters": {"rope_type": "no such thing"}},
        {"rope_scaling": [1]},
        {"architectures": 7},
        {"architectures": [None]},
        {"model_type": []},
        {"model_type": "bert"},
        {"model_type": "no such family"},
        {"max_position_embeddings": "long"},
        {"quantization_config": {"quant_method": "no such method"}},
        {"quantization_config": 3},
        {"torch_dtype": "number"},
        {"dtype": {"a": 1}},
        {"layer_types": ["no such kind"] * 2},
        {"text_config": {"model_type": "llama", "hidden_size": 3}},
        {"intermediate_size": 1 << 45},
        {"rms_norm_eps": "small"},
        {"tie_word_embeddings": "perhaps"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_odd_configurations_are_refused_or_read(changes: dict[str, Any], llama: Path) -> None:
    said(llama, **changes)
    read_or_refuse(llama)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path)


def folder(path: Path) -> None:
    path.mkdir()


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def text(path: Path) -> None:
    path.write_text("3")


def half(path: Path) -> None:
    path.write_bytes(b'{"a": "\xff')


WHOLE = ["config.json", "tokenizer.json", "model.safetensors"]
KINDS = [text, half, deep, folder, loop, fifo]


@pytest.mark.parametrize("kind", KINDS if hasattr(os, "mkfifo") else KINDS[:-1])
@pytest.mark.parametrize("name", WHOLE)
def test_odd_files_are_refused(name: str, kind: Callable[[Path], None], llama: Path) -> None:
    (llama / name).unlink()
    kind(llama / name)
    with pytest.raises(RegardError):
        models.load(str(llama), device="cpu")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", KINDS if hasattr(os, "mkfifo") else KINDS[:-1])
def test_odd_files_beside_them_are_refused_or_left(
    name: str, kind: Callable[[Path], None], llama: Path
) -> None:
    (llama / name).unlink()
    kind(llama / name)
    read_or_refuse(llama)


def read_or_refuse(where: Path) -> None:
    try:
        seen = models.load(str(where), device="cpu").run(TEXT)
    except RegardError:
        return
    assert len(seen) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 0},
        {"heads": "two"},
        {"heads": 5},
        {"d_model": -16},
        {"d_model": 1 << 40},
        {"layers": 10**9},
        {"layers": 0},
        {"layers": None},
        {"vocabulary": 3},
        {"vocabulary": 1.5},
        {"longest": "long"},
        {"longest": -1},
        {"dropout": "much"},
        {"dropout": 7},
        {"more": 1},
    ],
    ids=str,
)
def test_odd_sizes_of_own_models_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    place = written(causal(), tmp_path / "own")
    said(place, **changes)
    with pytest.raises(RegardError, match="the weights of the model cannot be read"):
        models.load(str(place), device="cpu")


@pytest.mark.parametrize("kind", KINDS if hasattr(os, "mkfifo") else KINDS[:-1])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "card.json"]
)
def test_odd_files_of_own_models_are_refused(
    name: str, kind: Callable[[Path], None], tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers")
    place = written(causal(), tmp_path / "own")
    (place / name).unlink(missing_ok=True)
    kind(place / name)
    with pytest.raises(RegardError):
        models.load(str(place), device="cpu")


@pytest.mark.parametrize(
    "change",
    [
        lambda vocabulary, merges: vocabulary.pop("a"),
        lambda vocabulary, merges: vocabulary.update(a="1"),
        lambda vocabulary, merges: vocabulary.update(a=vocabulary["b"]),
        lambda vocabulary, merges: vocabulary.update(a=10**9),
        lambda vocabulary, merges: vocabulary.update({"漢": len(vocabulary)}),
        lambda vocabulary, merges: merges.append(["t", "漢"]),
        lambda vocabulary, merges: merges.append(["t"]),
        lambda vocabulary, merges: merges.append([[], []]),
        lambda vocabulary, merges: merges.append(["Z", "Z"]),
    ],
)
def test_odd_vocabularies_are_refused(change: Callable[[Any, Any], Any], tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    place = written(causal(), tmp_path / "own")
    path = place / "tokenizer.json"
    about = json.loads(path.read_text())
    change(about["model"]["vocab"], about["model"]["merges"])
    path.write_text(json.dumps(about))
    with pytest.raises(RegardError, match="the tokenizer cannot be read"):
        models.load(str(place), device="cpu")


def test_own_weights_that_are_cut_short_say_so(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    place = written(causal(), tmp_path / "own")
    path = place / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RegardError, match="may have been cut short"):
        models.load(str(place), device="cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux does")
def test_own_models_take_no_more_than_their_weights(tmp_path: Path) -> None:
    import resource

    pytest.importorskip("tokenizers")
    place = written(causal(), tmp_path / "own")
    said(place, vocabulary=1 << 28)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RegardError):
        models.load(str(place), device="cpu")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19


def test_a_whole_folder_is_read_as_before(llama: Path) -> None:
    want = load_file(llama / "model.safetensors")
    found = load_model(str(llama), device="cpu").model.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in want.items())
    save_file(want, llama / "model.safetensors", {"format": "pt"})
