"""Laws of costs, rooflines, and how they are shown."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from regard import RegardError, cost, masks
from regard.cost import units
from tests.fresh_process import FreshProcesses

LLAMA = cost.preset("llama-3-8b")
SIZES = some.fixed_dictionaries(
    {
        "width": some.sampled_from([32, 64, 96]),
        "layers": some.integers(1, 5),
        "key_heads": some.sampled_from([1, 2, 4]),
        "gated": some.booleans(),
        "vocabulary": some.sampled_from([0, 100]),
        "windows": some.sampled_from([(None,), (8,), (8, None), (5, 9, None)]),
        "dtype": some.sampled_from(["float32", "bfloat16"]),
    }
)
Sizes = dict[str, Any]


@given(sizes=SIZES, n=some.integers(1, 60), batch=some.integers(1, 3))
def test_a_model_is_the_sum_of_its_layers(sizes: Sizes, n: int, batch: int) -> None:
    c = cost.Configuration("any", heads=4, **sizes)
    whole = cost.model(c, n, batch=batch)
    single = [
        cost.model(c.but(layers=1, windows=(window,), vocabulary=0), n, batch=batch)
        for window, layers in c.layers_by_window().items()
        for _ in range(layers)
    ]
    words = 2 * n * batch * c.width * c.vocabulary
    assert whole.flops() == sum(one.flops() for one in single) + words
    assert whole.eager.kept == sum(one.eager.kept for one in single)
    assert whole.fused.peak == max(one.fused.peak for one in single)
    assert whole.cache is not None
    assert whole.cache.in_context == sum(one.cache.in_context for one in single if one.cache)


@given(sizes=SIZES, n=some.integers(1, 60))
def test_counts_steps_and_kinds_are_ordered(sizes: Sizes, n: int) -> None:
    c = cost.Configuration("any", heads=4, **sizes)
    found = cost.model(c, n)
    for step in ("forward", "backward", "training"):
        # Fused kernels compute scores again backward, so only forward is dense the most.
        assert found.flops("needed", step) <= found.flops("executed", step)
        assert found.flops("needed", step) <= found.flops("dense", step)
    assert found.flops("executed") <= found.flops("dense")
    for count in ("needed", "executed", "dense"):
        assert found.flops(count, "training") == found.flops(count) + found.flops(count, "backward")
    assert found.bytes_moved("fused") < found.bytes_moved("eager")
    if n > 1:
        assert found.fused.kept < found.eager.kept


@given(sizes=SIZES, n=some.integers(1, 40), batch=some.integers(2, 4))
def test_a_batch_multiplies_work_and_not_weights(sizes: Sizes, n: int, batch: int) -> None:
    c = cost.Configuration("any", heads=4, **sizes)
    one, many = (cost.model(c, n, batch=b) for b in (1, batch))
    assert many.flops("executed") == batch * one.flops("executed")
    assert many.weights == one.weights
    assert many.bytes_moved() < batch * one.bytes_moved()


def test_six_flops_for_each_parameter_and_token_of_a_training_step() -> None:
    # The rule of thumb, for a short text: pairs add little, and words that come in nothing.
    found = cost.model(LLAMA, 64)
    read = LLAMA.parameters_read()
    assert found.flops(step="training") == pytest.approx(6 * read * 64, rel=0.01)


def test_a_window_makes_a_long_context_linear() -> None:
    short, long = (cost.model("mistral-7b", n) for n in ("64k", "128k"))
    assert long.flops() == pytest.approx(2 * short.flops(), rel=0.02)
    full = [cost.model(cost.preset("mistral-7b").but(windows=(None,)), n) for n in ("64k", "128k")]
    assert full[1].flops() > 2.8 * full[0].flops()


@given(n=some.integers(1, 80), window=some.integers(1, 90))
def test_a_window_counts_the_query_as_hugging_face_does(n: int, window: int) -> None:
    c = cost.Configuration("one", 32, 4, 1, windows=(window,))
    theirs = masks.from_huggingface(is_causal=True, sliding_window=window)
    assert theirs is not None
    seen = sum(min(i + 1, window) for i in range(n))
    assert cost.model(c, n).part("scores").macs.needed == 32 * seen == 32 * theirs.count(n)


def test_a_mask_of_ones_own_replaces_causal() -> None:
    documents = masks.documents(torch.arange(8).repeat_interleave(8))
    packed = cost.model(LLAMA, 64, mask=masks.causal() & documents)
    assert packed.part("scores").flops() == 8 * cost.model(LLAMA, 8).part("scores").flops()


def test_experts_multiply_what_tokens_go_through() -> None:
    one = cost.Configuration("one", 64, 4, 2, gated=True)
    found = cost.model(one.but(experts=8, active_experts=2), 16).part("feed-forward")
    plain = cost.model(one, 16).part("feed-forward")
    assert found.flops() == 2 * plain.flops()
    read = 2 * (7 * one.expert_parameters) * 2
    assert found.fused_bytes - plain.fused_bytes > read


def test_a_roofline_by_hand() -> None:
    device = cost.Device("toy", {"float32": 1e9}, 1e6)
    x = torch.empty(1, 1, 100, 10, device="meta")
    found = cost.call(x, x, x, device=device)
    computing, moving = 4 * 100 * 100 * 10 / 1e9, (4 * 4 * 100 * 10 + 4 * 100) / 1e6
    assert found.time() == (moving, "memory")
    assert moving > computing
    quick = cost.Device("quick", {"float32": 1e3}, 1e6)
    assert found.time(quick) == (pytest.approx(computing * 1e6), "arithmetic")
    # Eager, each of the two products waits for its own.
    scores, mixed = found.part("scores").eager_bytes, found.part("weighted sum").eager_bytes
    assert found.time(how="eager").seconds == pytest.approx((scores + mixed) / 1e6)
    assert found.time(step="training").seconds == pytest.approx(3 * moving)


def test_eager_is_bound_by_memory_and_fused_by_arithmetic_on_a_gpu() -> None:
    found = cost.model(LLAMA, "32k", device="H100")
    assert found.time(how="fused").by == "arithmetic"
    assert found.time(how="eager").by == "memory"
    assert found.time(how="eager").seconds > 5 * found.time().seconds


def test_everything_public_is_there_and_comes_late(fresh: FreshProcesses) -> None:
    assert dir(cost) == sorted(cost.__all__)
    assert all(hasattr(cost, name) for name in cost.__all__)
    with pytest.raises(AttributeError, match=r"'regard.cost' has no attribute 'flops'"):
        cost.flops  # noqa: B018
    code = "import sys, regard; print([m for m in sys.modules if m.startswith('regard.cost.')])"
    assert fresh(code).out.strip() == "['regard.cost.call_counts']"


def test_what_is_asked_wrongly_is_explained() -> None:
    x = torch.empty(1, 1, 4, 4, device="meta")
    with pytest.raises(RegardError, match=r"a time needs a device[\s\S]*H100 SXM"):
        cost.call(x, x, x).time()
    with pytest.raises(RegardError, match="has no decoding"):
        cost.call(x, x, x, device="L4").tokens_per_second()
    with pytest.raises(RegardError, match="no such part\n  got:      'feed-forward'"):
        cost.call(x, x, x).part("feed-forward")
    with pytest.raises(RegardError, match="tile counts queries and keys"):
        cost.call(x, x, x, tile=(0, 128))
    with pytest.raises(RegardError, match="batch counts texts"):
        cost.model(LLAMA, 4, batch=0)
    with pytest.raises(RegardError, match=r"computes in floating point\n  got: .*int8"):
        cost.model(LLAMA, 4, dtype="int8")
    with pytest.raises(RegardError, match="compare takes costs\n  got:      none"):
        cost.compare([])


@pytest.mark.parametrize(
    "given", ["", "k", "0", "-1", "1.0001k", "12q", "1e5", "128kk", "65M", "9" * 400]
)
def test_contexts_that_count_nothing(given: str) -> None:
    with pytest.raises(RegardError, match="context counts tokens"):
        cost.model(LLAMA, given)


@given(n=some.floats(0, 1e20))
def test_numbers_are_shown_in_three_digits_and_mean_what_they_were(n: float) -> None:
    for show, step, units_ in (
        (units.counted, 1000, "kMGTPE"),
        (units.sized, 1024, "KMGTPE"),
    ):
        number, _, unit = show(n).partition(" ")
        if unit[:1] in ("B", ""):
            assert float(number) == pytest.approx(n, rel=0.006, abs=0.5)
        elif units_.index(unit[0]) < 4:
            value = float(number) * step ** (1 + units_.index(unit[0]))
            assert value == pytest.approx(n, rel=0.006)
            assert len(number) <= 5


def test_json_holds_everything_as_plain_numbers() -> None:
    found = json.loads(cost.model(LLAMA, "8k", device="H100").json())
    assert found["flops_per_mac"] == 2
    assert found["cache"]["per_token"] == 131072
    assert found["flops"]["forward"]["needed"] == 2 * found["macs"]["needed"]
    assert sum(p["macs"]["dense"] for p in found["parts"].values()) == found["macs"]["dense"]
    assert found["device"]["name"] == "H100 SXM"
    assert found["device"]["tokens_per_second"] > 100
    both = json.loads(cost.compare([cost.layer(64, 4, 16), cost.layer(64, 4, 32)]).json())
    assert [c["tokens"] for c in both["costs"]] == [16, 32]


@pytest.mark.parametrize("name", cost.PRESETS)
@pytest.mark.parametrize("device", ["Xeon 8480+", "A100"])
def test_tables_fit_eighty_columns(name: str, device: str) -> None:
    text = str(cost.model(name, "1M", batch=64, device=device))
    assert max(map(len, text.splitlines())) <= 80
    assert all(line == line.rstrip() for line in text.splitlines())


def test_it_is_said_whether_weights_and_cache_fit() -> None:
    assert "does not fit in 22.4 GiB" in str(cost.model("llama-3-70b", 1024, device="L4"))
    assert "GiB: fits in 22.4 GiB" in str(cost.model("llama-3-8b", 1024, device="L4"))


def test_comparisons_fit_eighty_columns_in_several_tables() -> None:
    text = str(cost.compare([cost.model(name, 1024, device="L4") for name in cost.PRESETS]))
    assert max(map(len, text.splitlines())) <= 80
    assert all(text.count(name) >= 1 for name in cost.PRESETS)


def test_a_layer_prints_exactly_this() -> None:
    text = str(cost.layer(768, 12, 1024, device="A100"))
    assert text.splitlines()[:12] == [
        "attention layer 768 wide, 12 heads 64 wide, 1,024 tokens, float32",
        "",
        "  forward pass     MACs  FLOPs: needed  executed   dense   share",
        "────────────────────────────────────────────────────────────────",
        "  projections    1.81 G         3.62 G    3.62 G  3.62 G   45.0%",
        "  scores          805 M         1.61 G    1.61 G  1.61 G   20.0%",
        "  weighted sum    805 M         1.61 G    1.61 G  1.61 G   20.0%",
        "  output          604 M         1.21 G    1.21 G  1.21 G   15.0%",
        "────────────────────────────────────────────────────────────────",
        "  forward        4.03 G         8.05 G    8.05 G  8.05 G  100.0%",
        "  backward                      16.1 G    17.7 G  16.1 G",
        "  training step                 24.2 G    25.8 G  24.2 G",
    ]
    assert "One MAC is two FLOPs" in text
