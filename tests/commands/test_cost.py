"""The command regard cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regard import cli, cost

runner = CliRunner()


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")


def output(*args: str) -> str:
    result = runner.invoke(cli.app, ["cost", *args])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_one_model_is_shown_as_its_cost_is() -> None:
    text = output("--model", "llama-3-8b", "--context", "128k")
    assert text == str(cost.model("llama-3-8b", 131072, device="H100 SXM")) + "\n"
    assert "cache, this context  16.0 GiB" in text
    assert "llama-3-8b was made for contexts up to 8,192 tokens" in text


def test_several_models_stand_side_by_side() -> None:
    text = output("-m", "llama-3-8b", "-m", "mistral-7b", "--context", "32k", "--device", "L4")
    assert text.splitlines()[0].split() == ["llama-3-8b", "mistral-7b"]


def test_json_and_dtype() -> None:
    found = json.loads(output("-m", "gpt2", "--json", "--dtype", "bfloat16", "--batch", "2"))
    assert (found["dtype"], found["tokens"]) == ("bfloat16", 2 * 8192)
    assert found["cache"]["per_token"] == 36 * 1024


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
        "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 100,
    }))  # fmt: skip
    assert "2 layers, 4 heads 16 wide" in output("-m", str(path))
    assert output("-m", str(tmp_path)) == output("-m", str(path))


def test_without_a_model_the_known_ones_are_listed() -> None:
    text = output()
    for name in (*cost.PRESETS, *cost.DEVICES):
        assert name in text
    assert "this machine" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["-m", "llama-9"], "regard: unknown model"),
        (["-m", "gpt2", "--context", "many"], "regard: context counts tokens"),
        (["-m", "gpt2", "--device", "abacus"], "regard: unknown device"),
        (["-m", "gpt2", "--dtype", "float12"], "regard: unknown dtype"),
        (["-m", "no/such/config.json"], "regard: the configuration cannot be read"),
        (["-m", "gpt2", "--device", "here"], "run: regard doctor --measure"),
        (["-m", "gpt2", "--plot", "a.doc"], "the format of a picture"),
    ],
)
def test_errors_explain_and_exit_with_2(args: list[str], says: str) -> None:
    result = runner.invoke(cli.app, ["cost", *args])
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "cost.png"
    text = output("-m", "gpt2", "--context", "1k", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert text == output("-m", "gpt2", "--context", "1k")
