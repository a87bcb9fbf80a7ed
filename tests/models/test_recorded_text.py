"""Loading models and recording what they do with a text: what is kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard import RegardError, cli

transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from regard.models.huggingface_models import load_model  # noqa: E402
from regard.models.named_models import load as open_model  # noqa: E402
from regard.models.recorded_text import record  # noqa: E402

WORDS = ["[UNK]", "the", "cat", "sat", "on", "mat", "."]
TEXT = "the cat sat on the mat ."
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
runner = CliRunner()


def tokenizer() -> Any:
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")


def write(folder: Path, name: str = "LlamaForCausalLM", **changes: Any) -> Path:
    """A small model in a folder."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    kind(kind.config_class(**SIZES | changes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write(tmp_path / "llama")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def invoke(*args: object, stdin: str | None = None) -> Any:
    return runner.invoke(cli.app, ["record", *map(str, args)], input=stdin)


def test_a_model_reads_a_text(llama: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.regard"
    result = invoke("--model", llama, "--text", text, "-o", out)
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM read 7 tokens" in result.stdout
    assert "model.layers.1.self_attn" in result.stdout
    model = transformers.LlamaForCausalLM.from_pretrained(llama, attn_implementation="eager")
    with torch.no_grad():
        want = model(torch.tensor([[1, 2, 3, 4, 1, 5, 6]]), output_attentions=True).attentions
    with regard.load(out) as seen:
        assert [token.strip() for token in seen.tokens or []] == TEXT.split()
        assert seen.model == "LlamaForCausalLM"
        for layer, weights in zip(seen.values(), want, strict=True):
            torch.testing.assert_close(layer.trace.weights(), weights, atol=1e-6, rtol=1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama", "run.regard", "text.txt"]


def test_the_table_of_layers_is_not_broken_into_lines(
    llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "run.regard"
    lines = invoke("--model", llama, "--text", text, "-o", out).stdout.splitlines()
    with regard.load(out) as seen:
        assert set(str(seen).splitlines()) <= set(lines)


def test_options(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.regard"
    result = invoke(
        "--model", llama, "--text", "-", "-o", out, "--keep", "statistics", "--layers", "*.1.*",
        "--max-tokens", 3, "--dtype", "bfloat16", "--device", "cpu", stdin=TEXT,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    with regard.load(out) as seen:
        assert list(seen) == ["model.layers.1.self_attn"]
        assert len(seen.tokens or []) == 3
        layer = seen["model.layers.1.self_attn"]
        assert len(layer.traces) == 0
        assert layer.statistics is not None
        assert layer.statistics.rows.tolist() == [3, 3]


def test_a_file_is_replaced_only_if_asked(llama: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.regard"
    out.write_text("mine")
    given = ("--model", llama, "--text", text, "-o", out)
    result = invoke(*given)
    assert result.exit_code == 2
    assert "add --force" in result.output
    assert out.read_text() == "mine"
    assert invoke(*given, "--force").exit_code == 0
    regard.load(out).close()


def test_encoders_are_read_without_a_last_layer(tmp_path: Path) -> None:
    folder = write(tmp_path / "bert", "BertForMaskedLM")
    seen = record(open_model(str(folder), device="cpu"), TEXT, tmp_path / "run.regard")
    assert seen.model == "BertModel"
    assert seen["encoder.layer.0.attention.self"].trace.mask is None


def test_progress_goes_from_nothing_to_all(llama: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    reader = open_model(str(llama), device="cpu")
    record(reader, TEXT, tmp_path / "run.regard", progress=lambda *at: told.append(at))
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}
    assert not any(m._forward_hooks for m in reader.model.modules())


@pytest.mark.parametrize("name", ["regard-small", "regard-king-james"])
def test_models_of_this_package_are_recorded_too(name: str, tmp_path: Path) -> None:
    out = tmp_path / "run.regard"
    written = tmp_path / "text.txt"
    written.write_text("You shall love your neighbor.")
    result = invoke("--model", name, "--text", written, "-o", out, "--max-tokens", "5")
    assert result.exit_code == 0, result.output
    with regard.load(out) as seen:
        assert seen.model == name
        first = next(iter(seen.values())).trace
    # Five tokens, and the mark at the beginning or the end.
    assert first.lse.shape[-1] == 6


def test_types_and_devices(llama: Path) -> None:
    assert load_model(str(llama), device="cpu").model.dtype == torch.float32
    half = load_model(str(llama), device="cpu", dtype="float16")
    assert half.model.dtype == torch.float16
    assert half.longest == 32
    with pytest.raises(RegardError, match="accepted: auto, float32, bfloat16, float16"):
        load_model(str(llama), dtype="int4")
    with pytest.raises(RegardError, match="no such device here"):
        load_model(str(llama), device="abacus")


@pytest.mark.parametrize("given", ["", "  \n"])
def test_nothing_to_read_is_refused(given: str, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.regard"
    result = invoke("--model", llama, "--text", "-", "-o", out, stdin=given)
    assert result.exit_code == 2
    assert "regard: there is nothing to read" in result.output
    assert not out.exists()


def test_texts_that_are_too_long_or_not_there(llama: Path, tmp_path: Path) -> None:
    given = ("--model", llama, "-o", tmp_path / "run.regard")
    result = invoke(*given, "--text", "-", stdin="the cat " * 20)
    assert result.exit_code == 2
    assert "got:      40 tokens" in result.output
    assert "--max-tokens 32" in result.output
    assert invoke(*given, "--text", "-", "--max-tokens", 32, stdin="cat " * 40).exit_code == 0
    result = invoke(*given, "--text", tmp_path / "none.txt", "--force")
    assert "the text cannot be read" in result.output
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "UTF-8" in invoke(*given, "--text", tmp_path / "latin.txt", "--force").output
    result = invoke(*given, "--text", "-", "--max-tokens", 0, "--force", stdin=TEXT)
    assert "max_tokens counts tokens" in result.output
    result = invoke(*given, "--text", "-", "--keep", "all", "--force", stdin=TEXT)
    assert "accepted: traces or statistics" in result.output


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "a/b/c", "strange name"])
def test_folders_that_are_not_there(name: str) -> None:
    with pytest.raises(RegardError, match="there is no such model"):
        load_model(name)


def test_folders_without_a_model(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(RegardError, match=r"without config\.json"):
        load_model(str(tmp_path))
    (llama / "config.json").write_text("{")
    with pytest.raises(RegardError, match=r"config\.json of the model cannot be read"):
        load_model(str(llama))


def test_a_name_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RegardError, match="hf download NAME --local-dir FOLDER"):
        load_model("nobody-at-all/no-such-model")


class Trap:
    """Says so if it is ever made from a pickle."""

    def __reduce__(self) -> Any:
        return (open, ("pickle-was-run", "w"))


def test_pickled_weights_are_refused_and_not_opened(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(llama)
    (llama / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Trap()}, llama / "pytorch_model.bin")
    with pytest.raises(RegardError, match=r"no safetensors weights\n.*pytorch_model\.bin"):
        load_model(str(llama))
    assert not (llama / "pickle-was-run").exists()


def test_code_of_a_model_is_refused_and_not_run(llama: Path) -> None:
    about = json.loads((llama / "config.json").read_text())
    about |= {"model_type": "mine", "auto_map": {"AutoConfig": "own.Config"}}
    (llama / "config.json").write_text(json.dumps(about))
    (llama / "own.py").write_text(f"open({str(llama / 'code-was-run')!r}, 'w')\n")
    with pytest.raises(RegardError, match="comes with its own code, which is not run"):
        load_model(str(llama))
    # A family that transformers knows is loaded with transformers' own code.
    about["model_type"] = "llama"
    (llama / "config.json").write_text(json.dumps(about))
    load_model(str(llama), device="cpu")
    assert not (llama / "code-was-run").exists()


def test_weights_that_are_missing_are_not_made_up(llama: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(RegardError, match=r"without model\.layers\.1\.self_attn\.q_proj\.weight"):
        load_model(str(llama))


def test_models_that_read_and_write_two_texts(tmp_path: Path) -> None:
    sizes = {"vocab_size": 7, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    folder = write(tmp_path / "t5", "T5ForConditionalGeneration", **sizes)
    with pytest.raises(RegardError, match=r"'.*t5' \(t5\)"):
        load_model(str(folder))


def test_a_model_whose_attention_is_written_out(text: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "n_head": 2}
    folder, out = write(tmp_path / "bloom", "BloomForCausalLM", **sizes), tmp_path / "run.regard"
    result = invoke("--model", folder, "--text", text, "-o", out)
    assert result.exit_code == 0, result.output
    with regard.load(out) as file:
        assert [layer.heads for layer in file.values()] == [2, 2]


def test_a_model_whose_attention_cannot_be_seen(text: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    folder, out = write(tmp_path / "mamba", "MambaForCausalLM", **sizes), tmp_path / "run.regard"
    result = invoke("--model", folder, "--text", text, "-o", out)
    assert result.exit_code == 2
    assert "no attention was seen" in result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mamba", "text.txt"]
