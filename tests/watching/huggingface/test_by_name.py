"""attn_implementation="regard": the answers of eager attention, in training and generating."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import regard

transformers = pytest.importorskip("transformers")

from regard.watching.huggingface.later_weights import LaterWeights  # noqa: E402
from tests.fresh_process import FreshProcesses  # noqa: E402
from tests.watching.huggingface.test_huggingface import (  # noqa: E402
    FAMILIES,
    answers,
    build,
    inputs,
    padded,
    tokens,
)

FEW = ("llama", "gemma2", "gemma3_text", "gpt_oss", "gpt2")
"""Grouped heads, a soft-cap and windows, layers that differ, sinks, and an old one."""


def both(family: str) -> tuple[Any, Any]:
    """The same model with eager attention and with regard's."""
    eager, ours = build(family), build(family, "regard")
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def close(got: Tensor, want: Tensor, times: float = 1.0, largest: float | None = None) -> None:
    got, want = got.detach(), want.detach()
    atol = times * 2e-6 * (float(want.abs().max()) if largest is None else largest)
    torch.testing.assert_close(got, want, atol=atol, rtol=times * 2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_gradients_are_those_of_eager_attention(family: str) -> None:
    eager, ours = both(family)
    given = inputs(eager, family)
    want, got = list(answers(eager(**given), given)), list(answers(ours(**given), given))
    assert want
    total: list[Tensor] = [torch.zeros(()), torch.zeros(())]
    for (a, real), (b, _) in zip(want, got, strict=True):
        a, b = (a, b) if real is None else (a[real], b[real])
        close(b, a)
        pull = torch.randn(a.shape, generator=torch.Generator().manual_seed(3))
        total = [total[0] + (a * pull).sum(), total[1] + (b * pull).sum()]
    for loss in total:
        loss.backward()
    grads = {path: p.grad for path, p in eager.named_parameters() if p.grad is not None}
    learned = dict(ours.named_parameters())
    # The bias of a key is the same for a whole row: its gradient is 0 but for rounding.
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for path, grad in grads.items():
        close(learned[path].grad, grad, times=10, largest=largest)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FEW)
def test_what_is_generated_is_the_same(family: str, cache: str) -> None:
    if cache == "static" and family == "gpt2":
        pytest.skip("one cache of a fixed size will do for models alike")
    eager, ours = both(family)
    given = {"input_ids": tokens(), "attention_mask": padded(9, 5, left=True)}
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    kind = {} if cache == "dynamic" else {"cache_implementation": "static"}
    want = eager.generate(**given, **how, output_logits=True, pad_token_id=0)
    # A static cache would be compiled, which takes longer than all the rest.
    got = ours.generate(
        **given, **how, **kind, output_logits=True, pad_token_id=0, disable_compile=True
    )
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(want.logits, got.logits, strict=True):
        close(b, a, times=4)


def test_packed_sequences_see_themselves_alone() -> None:
    eager, ours = both("llama")
    ids = tokens(1, 9)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    got = ours(ids, position_ids=places, use_cache=False).logits
    apart = [eager(part).logits for part in (ids[:, :4], ids[:, 4:])]
    close(got, torch.cat(apart, 1))


def test_a_name_can_be_set_and_set_back() -> None:
    model = build("llama")
    ids = tokens()
    want = model(ids).logits
    model.set_attn_implementation("regard")
    assert model.config._attn_implementation == "regard"
    close(model(ids).logits, want)
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"
    close(model(ids).logits, want)


def test_watching_sees_what_runs_and_restores_the_name() -> None:
    eager, ours = both("llama")
    ids = tokens()
    with regard.watch(ours, keep="traces") as seen:
        got = ours(ids).logits
    close(got, eager(ids).logits)
    assert len(seen) == 2
    assert ours.config._attn_implementation == "regard"
    close(ours(ids).logits, got)


@pytest.mark.parametrize("how", ["all", "one"])
def test_weights_are_worked_out_when_they_are_looked_at(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, ours = both("llama")
    given = {"input_ids": tokens(), "attention_mask": padded(9, 6, left=True)}
    asked: list[tuple[int, ...]] = []
    weigh = regard.Trace.weights

    def note(self: regard.Trace, *args: Any, **kwargs: Any) -> Tensor:
        found = weigh(self, *args, **kwargs)
        asked.append(tuple(found.shape))
        return found

    monkeypatch.setattr(regard.Trace, "weights", note)
    with torch.no_grad():
        want = eager(**given, output_attentions=True).attentions
        got = ours(**given, output_attentions=True).attentions
    assert not asked
    assert all(isinstance(w, LaterWeights) for w in got)
    assert [(w.shape, w.dtype, w.device, w.ndim) for w in got] == [
        (w.shape, w.dtype, w.device, w.ndim) for w in want
    ]
    if how == "one":
        torch.testing.assert_close(got[1][0, 3], want[1][0, 3])
        torch.testing.assert_close(got[1][-1, 0, 8], want[1][-1, 0, 8])
        torch.testing.assert_close(got[1][0], want[1][0])
        assert asked == [(1, 1, 9, 9), (1, 1, 9, 9), (1, 4, 9, 9)]
        return
    seeing = given["attention_mask"].bool()[:, None, :, None].expand(2, 4, 9, 1).squeeze(-1)
    stacked, expected = torch.stack(got), torch.stack(want)
    assert type(stacked) is Tensor
    torch.testing.assert_close(stacked[:, seeing], expected[:, seeing])
    assert len(asked) == 2
    first = got[0]
    assert first.numpy().shape == (2, 4, 9, 9)
    assert torch.equal(copy.deepcopy(first), first + 0)
    assert "tensor(" in repr(first)
    assert first.tolist() == stacked[0].tolist()
    assert len(asked) == 2


@pytest.mark.compiled
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bert"])
def test_one_graph_holds_a_compiled_model(family: str) -> None:
    eager, ours = both(family)
    given = inputs(eager, family)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for some in (given, {"input_ids": given["input_ids"]}):
        (want, real), *_ = answers(eager(**some), some)
        (got, _), *_ = answers(compiled(**some), some)
        want, got = (want, got) if real is None else (want[real], got[real])
        close(got, want, times=2)
    got.sum().backward()
    assert all(p.grad is not None for p in ours.parameters() if p.requires_grad and p.ndim > 1)


@pytest.mark.compiled
def test_watching_a_compiled_model_sees_it() -> None:
    _, ours = both("llama")
    ids = tokens()
    compiled = torch.compile(ours, backend="aot_eager")
    with torch.no_grad():
        want = compiled(ids).logits
        with regard.watch(ours, keep="traces") as seen:
            got = compiled(ids).logits
    close(got, want)
    assert [layer.calls for layer in seen.values()] == [1, 1]


@pytest.mark.parametrize("order", ["before", "after"])
def test_importing_either_first_registers_the_name(order: str, fresh: FreshProcesses) -> None:
    first, second = ("import transformers.modeling_utils", "import regard")
    if order == "before":
        first, second = second, first
    code = (
        f"{first}\n{second}\n"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as f\n"
        "from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as m\n"
        "assert 'regard' in f and 'regard' in m\n"
        "import sys, inspect, transformers.modeling_utils as u\n"
        "assert not any('regard' in type(x).__module__ for x in sys.meta_path)\n"
        "assert 'class AttentionInterface' in inspect.getsource(u)\n"
    )
    done = fresh(code)
    assert done.code == 0, done.err


def test_a_mask_may_be_given_by_its_name() -> None:
    """As models of pictures do: their layers name all arguments."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    config = Qwen2VLVisionConfig(
        depth=1, embed_dim=32, num_heads=4, hidden_size=32, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=1,
    )  # fmt: skip
    model = Qwen2VisionTransformerPretrainedModel._from_config(
        config, attn_implementation="sdpa"
    ).eval()
    pixels, grid = torch.randn(16, 3 * 16), torch.tensor([[1, 4, 4]])
    with torch.no_grad():
        plain = model(pixels, grid_thw=grid)[0]
        with regard.watch(model) as seen:
            watched = model(pixels, grid_thw=grid)[0]
        model.set_attn_implementation("regard")
        named = model(pixels, grid_thw=grid)[0]
    assert len(seen) == 1
    for answer in (watched, named):
        torch.testing.assert_close(answer, plain, rtol=1e-4, atol=1e-5)
