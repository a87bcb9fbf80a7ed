"""Sizes of known models, from presets and from files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from regard import RegardError, cost
from regard.cost import config_json
from regard.cost.config_json import FAMILIES

PUBLISHED = {
    # Parameters in millions, as counted from the released weights.
    "gpt2": 124.4,
    "gpt2-xl": 1557.6,
    "llama-2-7b": 6738.4,
    "llama-3-8b": 8030.3,
    "llama-3-70b": 70553.7,
    "mistral-7b": 7241.7,
    "mixtral-8x7b": 46702.8,
    "gemma-2-9b": 9241.7,
    "qwen2.5-7b": 7615.6,
    "phi-3-mini": 3821.1,
}


def test_every_preset_is_checked_here() -> None:
    assert set(PUBLISHED) == set(cost.PRESETS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_presets(name: str) -> None:
    # Norms, biases and learned positions are left out: at most 1 %, and never more than published.
    counted = cost.preset(name).parameters / 1e6
    assert 0.99 * PUBLISHED[name] < counted < 1.00001 * PUBLISHED[name]


FILES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_ctx": 1024,
             "n_positions": 1024, "vocab_size": 50257},
    "llama-3-8b": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
                   "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
                   "max_position_embeddings": 8192, "vocab_size": 128256,
                   "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "mistral-7b": {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
                   "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
                   "max_position_embeddings": 32768, "vocab_size": 32000, "sliding_window": 4096,
                   "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "mixtral-8x7b": {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
                     "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
                     "max_position_embeddings": 32768, "vocab_size": 32000, "sliding_window": None,
                     "num_local_experts": 8, "num_experts_per_tok": 2, "torch_dtype": "bfloat16"},
    "gemma-2-9b": {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
                   "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
                   "head_dim": 256, "max_position_embeddings": 8192, "vocab_size": 256000,
                   "sliding_window": 4096, "torch_dtype": "bfloat16"},
    "qwen2.5-7b": {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
                   "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
                   "max_position_embeddings": 131072, "vocab_size": 152064,
                   "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28,
                   "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "phi-3-mini": {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
                   "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
                   "max_position_embeddings": 4096, "vocab_size": 32064, "sliding_window": 2047,
                   "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
}  # fmt: skip


def written(folder: Path, content: object, name: str = "model") -> Path:
    (folder / name).mkdir()
    path = folder / name / "config.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", FILES)
def test_files_give_what_presets_hold(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, FILES[name], name)
    assert cost.Configuration.from_json(path) == cost.preset(name)
    assert cost.Configuration.from_json(path.parent) == cost.preset(name)


def test_every_family_agrees_with_its_own_configuration_class(tmp_path: Path) -> None:
    from transformers import AutoConfig

    for family in FAMILIES:
        theirs = AutoConfig.for_model(family)
        content = json.loads(theirs.to_json_string(use_diff=False))
        ours = cost.Configuration.from_json(written(tmp_path, content, family))
        width = theirs.hidden_size
        assert (ours.width, ours.heads, ours.layers) == (
            width, theirs.num_attention_heads, theirs.num_hidden_layers
        ), family  # fmt: skip
        assert ours.key_heads == (getattr(theirs, "num_key_value_heads", None) or ours.heads)
        assert ours.head_width == (getattr(theirs, "head_dim", None) or width // ours.heads)
        assert ours.tied == theirs.tie_word_embeddings, family


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "phi", "gemma2", "qwen2", "phi3"])
def test_parameters_are_those_of_a_real_model(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128}
    sizes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    if family != "gpt2":
        sizes["intermediate_size"] = 96
    if not family.startswith("gpt"):
        sizes["num_key_value_heads"] = 2
    config = AutoConfig.for_model(family, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    content = json.loads(config.to_json_string(use_diff=False))
    ours = cost.Configuration.from_json(written(tmp_path, content))
    named = dict(model.named_parameters())
    matrices = {n: p.numel() for n, p in named.items() if p.ndim == 2 and "wpe" not in n}
    assert ours.parameters == sum(matrices.values())


def test_windows_by_layer(tmp_path: Path) -> None:
    base = FILES["gemma-2-9b"]
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    for name, content, windows in (
        ("types", base | {"num_hidden_layers": 3, "layer_types": kinds}, {4096: 1, None: 2}),
        ("gemma3", base | {"model_type": "gemma3_text"}, {4096: 35, None: 7}),
        ("two", base | {"num_hidden_layers": 3}, {4096: 2, None: 1}),
        (
            "late",
            FILES["qwen2.5-7b"] | {"use_sliding_window": True, "max_window_layers": 20},
            {None: 20, 131072: 8},
        ),
    ):
        found = cost.Configuration.from_json(written(tmp_path, content, name))
        assert found.layers_by_window() == windows, name


def test_the_part_that_reads_is_taken_from_models_that_see(tmp_path: Path) -> None:
    content = {"model_type": "llava", "text_config": FILES["llama-3-8b"]}
    assert cost.Configuration.from_json(written(tmp_path, content)).key_heads == 8


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("inside", [{}, {"torch_dtype": None}, {"dtype": "float64"}])
def test_models_that_see_say_their_dtype_outside(
    name: str, inside: dict[str, Any], tmp_path: Path
) -> None:
    # As transformers writes them: weights would count double in the default, float32.
    sizes = {key: value for key, value in FILES["llama-3-8b"].items() if key != "torch_dtype"}
    content = {"model_type": "llava", "text_config": sizes | inside, name: "bfloat16"}
    found = cost.Configuration.from_json(written(tmp_path, content))
    assert found.dtype == inside.get("dtype", "bfloat16")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model_type": "mamba"}, r"this family of models is not known here\n  got: .*'mamba'"),
        ({}, r"model_type=None\n  accepted: gpt2, gpt_neox, phi, llama"),
        ([], "a JSON list"),
        ({"model_type": "llama"}, "does not say num_hidden_layers"),
        (FILES["llama-3-8b"] | {"hidden_size": "4096"}, "hidden_size must be a whole number"),
        (FILES["llama-3-8b"] | {"num_hidden_layers": 10**9}, "too many layers"),
        (FILES["llama-3-8b"] | {"hidden_size": 10**12}, "width is a size"),
        (FILES["llama-3-8b"] | {"torch_dtype": "float8_e4m3fn"}, "unknown dtype"),
        (FILES["llama-3-8b"] | {"num_key_value_heads": 5}, "32 query heads cannot share 5"),
    ],
)
def test_files_that_cannot_be_read_say_why(content: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=says):
        cost.Configuration.from_json(written(tmp_path, content))


def test_files_that_are_no_json_say_why(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"cannot be read\n  got: .*No such"):
        cost.Configuration.from_json(tmp_path / "none.json")
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(RegardError, match="the configuration cannot be read"):
        cost.Configuration.from_json(path)
    path.write_text(" " * (1 << 21))
    with pytest.raises(RegardError, match="is too large for a configuration"):
        cost.Configuration.from_json(path)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"width": 0}, "width is a size\n  got:      0"),
        ({"layers": -2}, "layers is a size"),
        ({"key_heads": 3}, "4 query heads cannot share 3 key heads"),
        ({"windows": (0,)}, "windows says how many keys a query sees, itself counted"),
        ({"windows": ()}, "windows says"),
        ({"experts": 2, "active_experts": 3}, "more experts are active than there are"),
        ({"dtype": "float12"}, "unknown dtype"),
    ],
)
def test_sizes_that_make_no_model_are_refused(sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(RegardError, match=says):
        cost.Configuration(**({"name": "x", "width": 64, "heads": 4, "layers": 2} | sizes))


def test_variants_change_what_is_named_and_refuse_what_is_not() -> None:
    llama = cost.preset("llama-3-8b")
    assert llama.but(layers=1).layers == 1
    with pytest.raises(RegardError, match="no such field\n  got:      kv_heads"):
        llama.but(kv_heads=1)


def test_unknown_names_suggest_a_known_one() -> None:
    with pytest.raises(RegardError, match=r"unknown model[\s\S]*did you mean llama-3-8b\?"):
        cost.preset("llama3-8b")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(RegardError, match="not a regular file"):
        config_json.read(tmp_path)


@pytest.mark.parametrize("kind", [[], {}, None, 3])
def test_a_family_that_is_no_name_is_refused(kind: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(RegardError, match="this family of models is not known here"):
        config_json.read(tmp_path)
