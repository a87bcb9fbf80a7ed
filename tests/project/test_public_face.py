"""The names that people import, written out: what is behind them may move, these stay."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import regard
from regard.lab.apparatus.experiments import NAMES

FACE = {
    "regard": """
        Monitor Plan RegardError RegardWarning Trace attention biases caches cost interpret lab
        linear load masks models nn parallel plan scores trace view warm_up watch
    """,
    "regard.masks": """
        Mask blocks causal dilated documents from_flash from_huggingface from_multihead from_sdpa
        global_tokens ignore keep padding prefix where window
    """,
    "regard.scores": "Score additive cosine distance dot general scaled_dot",
    "regard.biases": "Bias alibi dense pairwise relative slopes",
    "regard.nn": """
        AdditiveAttention AttentionProcessor Cache DecoderBlock DecoderTraces DotAttention DropIn
        DropInError EncoderBlock LinearAttention MultiHeadAttention Rotary StaticAttention
        attention_processors elu_plus_one from_torch linear_attention load_weights
        replace_attention
    """,
    "regard.caches": "EvictingCache HeavyHitters PerHead Policy ReceivedPress WindowVotes",
    "regard.linear": """
        RandomFeatures SignedTrace State attention delta delta_trace elu_plus_one gated gated_trace
        random_features trace
    """,
    "regard.cost": """
        DEVICES PRESETS Comparison Configuration Cost Device Part cache_bytes call compare
        dense_pairs device forward_flops layer least_bytes model needed_pairs preset visited_pairs
    """,
    "regard.parallel": """
        Layout ParallelPlan ParallelTrace attention by_document contiguous merge plan trace zigzag
    """,
    "regard.view": "App Patches head_grid heat_map page serve shaded widget",
    "regard.models": """
        NAMES Card CausalConfig CausalModel HuggingFaceReader OwnReader OwnTranslator Reader
        Tokenizer TranslatorConfig TranslatorModel load
    """,
    "regard.interpret": """
        Anatomy Attribution Circuit Citation Citations Compositions Counted Effect Effects
        Faithfulness Grounding HeadScores Kept LogitParts Word ablate alignment_error_rate anatomy
        attribute badges circuit citations compositions direct_logits faithfulness grounding heads
        heavy_hitters intervene knock_out metrics patch prune token_times window_votes
        word_alignment word_links word_times
    """,
}
EXPERIMENTS = (
    "tour bottleneck scaling roles words heads faithfulness reach order domains cost counting"
)
# What the documentation has people import beside these, now or before.
TOLD = [
    ("regard.interpret.interventions", "Activations CallPart Cut Intervention Patched Replaced"),
    ("regard.interpret.metrics", "kl logit_difference loss probability"),
    ("regard.monitoring", "Projections QKClip"),
    ("regard.monitoring.rules", "EntropyCollapse LogitExplosion"),
    ("regard.watching.rules", "EntropyCollapse LogitExplosion"),
    (
        "regard.watching",
        "Layer Monitor Projections QKClip Report Seen Statistics Watch load watch",
    ),
    ("regard.view.atlas", "head_figures"),
    ("regard.view.heads", "head_figures"),
    ("regard.view.subjects", "vectors"),
    ("regard.view.spelling", "vectors"),
]
PICTURES = "arcs entropy_by_layer head_grid heat_map save word_maps"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", FACE)
def test_the_names_of_a_module_are_these(name: str) -> None:
    module = import_module(name)
    assert sorted(module.__all__) == sorted(FACE[name].split())
    for each in module.__all__:
        assert getattr(module, each) is not None
        assert each in dir(module)


def test_the_experiments_are_these() -> None:
    assert list(NAMES) == EXPERIMENTS.split()
    for name in NAMES:
        assert callable(import_module(f"regard.lab.{name}").run)


@pytest.mark.parametrize(("module", "names"), TOLD)
def test_what_the_documentation_has_people_import_is_there(module: str, names: str) -> None:
    for name in names.split():
        assert callable(getattr(import_module(module), name))


def test_a_name_that_moved_is_the_same_thing() -> None:
    assert (
        import_module("regard.watching.rules").LogitExplosion
        is import_module("regard.monitoring.rules").LogitExplosion
    )


def test_pictures_are_found_by_their_name() -> None:
    pytest.importorskip("matplotlib")
    assert sorted(import_module("regard.view.picture").__all__) == sorted(PICTURES.split())
    for name in ("cost_plot", "lab_page", "lab_picture", "picture"):
        assert name in dir(regard.view)
        assert getattr(regard.view, name) is not None


def test_every_import_of_the_documentation_works() -> None:
    pytest.importorskip("matplotlib")
    texts = [path.read_text("utf-8") for path in (*ROOT.glob("docs/**/*.md"), ROOT / "README.md")]
    lines = {
        line
        for text in texts
        for line in re.findall(r">>> (from regard[\w.]* import [\w, ]+|import regard[\w.]*)", text)
    }
    assert len(lines) > 10
    for line in lines:
        exec(line, {})


def test_a_typed_program_runs_and_is_checked_with_the_package(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from examples import typed

    # Its types are held by `make check`: mypy alone takes a minute where nothing is in its cache.
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    assert checked["strict"]
    assert "examples/typed.py" in checked["files"]
    typed.main()
    assert "blocks.7.attention head 7" in capsys.readouterr().out
