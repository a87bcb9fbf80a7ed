"""Watching models that call FlexAttention: what its functions mean, and that its answers stay."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)

import regard
from regard import RegardError, biases, masks
from regard.backends.flex import VECTORS
from regard.values import Shape
from regard.watching.flex import calls as flex_calls
from regard.watching.flex import mask_mods, pair_functions
from regard.watching.flex.mask_mods import mask_of
from regard.watching.flex.score_mods import change_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning"),
]
CPU = torch.device("cpu")
B, H, N = 2, 4, 63
SHAPE = Shape(B, H, N, N)
DOCUMENTS = torch.tensor([0] * 20 + [1] * 13 + [2] * 30)
LENGTHS = torch.tensor([50, 63])
SLOPES = biases.slopes(H)
Mod = Callable[..., Any]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


TABLE, DENSE = numbers(H, 2 * N), numbers(N, N)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


MASKS: dict[str, tuple[Mod, masks.Mask | None]] = {
    "causal": (causal, masks.causal()),
    "a window": (lambda b, h, q, k: (q >= k) & (q - k <= 9), masks.window(9)),
    "two sides": (lambda b, h, q, k: (q - k).abs() <= 9, masks.window(9, 9)),
    "ahead": (lambda b, h, q, k: q + 5 >= k, masks.causal(5)),
    "documents": (
        lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k], masks.documents(DOCUMENTS[None])
    ),
    "causal documents": (
        lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k),
        masks.causal() & masks.documents(DOCUMENTS[None]),
    ),
    "prefix": (
        lambda b, h, q, k: (k < 20) | (q >= k), masks.causal() | masks.prefix(torch.tensor([20]))
    ),
    "padding": (lambda b, h, q, k: k < LENGTHS[b], masks.padding(LENGTHS)),
    "causal padding": (
        lambda b, h, q, k: (k < LENGTHS[b]) & (q >= k), masks.causal() & masks.padding(LENGTHS)
    ),
    "and": (
        and_masks(causal, lambda b, h, q, k: q - k < 9), masks.causal() & masks.window(8, None)
    ),
    "or": (or_masks(causal, lambda b, h, q, k: k < 7), masks.causal() | masks.padding([7])),
    "everything": (module.noop_mask, masks.window(None, None)),
    "regard's own": (masks.dilated(3).bind(SHAPE, CPU).allows, masks.dilated(3).bind(SHAPE, CPU)),
    "per head": (lambda b, h, q, k: (q >= k) & (q - k <= 3 * h), None),
    "with holes": (lambda b, h, q, k: (q - k) % 3 == 0, None),
    "nothing": (lambda b, h, q, k: q < 0, None),
    "almost causal": (lambda b, h, q, k: (q >= k) & ~((q == 40) & (k == 17)), None),
}  # fmt: skip


@pytest.mark.parametrize("piece", [1 << 10, 1 << 22], ids=["in pieces", "at once"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_recognised_by_what_they_do(
    name: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_functions, "PIECE", piece)
    function, want = MASKS[name]
    mask = mask_of(function, SHAPE, CPU)
    if want is not None:
        assert mask == want
    allowed = mask.bind(SHAPE, CPU).dense(N).expand(SHAPE)
    plain = lambda b, h, q, k: function(b, h, q, k)  # noqa: E731
    assert torch.equal(allowed, create_mask(plain, B, H, N, N, device="cpu"))


@pytest.mark.parametrize("keys", [40, 90])
def test_fewer_or_more_keys_than_queries(keys: int) -> None:
    shape, end = Shape(1, 1, N, keys), keys - N
    assert mask_of(causal, shape, CPU) == masks.causal(0)
    assert mask_of(lambda b, h, q, k: q + end >= k, shape, CPU) == masks.causal()
    window = mask_of(lambda b, h, q, k: (q >= k) & (q - k < 4), shape, CPU)
    assert torch.equal(
        window.dense(N, keys), (masks.causal(0) & masks.window(3, offset=0)).dense(N, keys)
    )


def test_a_mask_too_large_to_write_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_mods, "LARGEST", N * N - 1)
    assert mask_of(causal, SHAPE, CPU) == masks.causal()
    with pytest.raises(RegardError, match="too large to be written out"):
        mask_of(MASKS["with holes"][0], SHAPE, CPU)


def soft(s: Tensor) -> Tensor:
    return 2.0 * torch.tanh(s / 2.0)


SCORES: dict[str, Mod] = {
    "as it is": lambda s, b, h, q, k: s,
    "a factor": lambda s, b, h, q, k: 3 * s / 4,
    "turned": lambda s, b, h, q, k: 1.0 - s,
    "soft-cap": lambda s, b, h, q, k: soft(s),
    "turned soft-cap": lambda s, b, h, q, k: -1.5 * torch.tanh(s),
    "alibi": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "signed alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "relative": lambda s, b, h, q, k: s + TABLE[h, q - k + N],
    "distance": lambda s, b, h, q, k: s + (q - k) / 8,
    "dense": lambda s, b, h, q, k: s + DENSE[q, k],
    "per batch": lambda s, b, h, q, k: s + 0.1 * b * (k % 5),
    "soft-cap and bias": lambda s, b, h, q, k: soft(s) + DENSE[q, k],
    "hidden": lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf),
    "hidden by fill": lambda s, b, h, q, k: s.masked_fill(q < k, -math.inf),
    "all of it": lambda s, b, h, q, k: torch.where(
        q < k, torch.tensor(-math.inf), soft(s) - SLOPES[h] * (q - k).abs()
    ),
}


class Flex(nn.Module):
    """One call of a function that passes for flex_attention."""

    def __init__(self, attend: Mod = flex_attention, **how: Any) -> None:
        super().__init__()
        self.attend, self.how = attend, how

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.attend(q, k, v, **self.how)


def qkv(n: int = N, groups: int = H) -> list[Tensor]:
    return [numbers(B, h, n, 16, seed=i) for i, h in enumerate((H, groups, groups))]


def weights_of(q: Tensor, k: Tensor, score_mod: Mod | None, mask: Tensor | None = None) -> Tensor:
    """The formula, n×n."""
    s = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    if score_mod is not None:
        b, h, i, j = (torch.arange(n) for n in s.shape)
        places = b[:, None, None, None], h[:, None, None], i[:, None], j
        s = score_mod(s, *places)
    return (s if mask is None else s.masked_fill(~mask, -math.inf)).softmax(-1)


@pytest.mark.parametrize("name", SCORES)
def test_traces_of_score_mods_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its answers are the same numbers, without a graph that is made for each function.
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    q, k, v = qkv()
    model = Flex(score_mod=SCORES[name])
    with torch.no_grad():
        want = model(q, k, v)
        with regard.watch(model, keep="traces") as seen:
            torch.testing.assert_close(model(q, k, v), want)
    torch.testing.assert_close(
        seen[""].trace.weights().double(), weights_of(q, k, SCORES[name]), atol=2e-6, rtol=2e-5
    )


def test_biases_stay_small_where_only_distance_matters() -> None:
    found = {name: change_of(mod, SHAPE, CPU) for name, mod in SCORES.items()}
    assert found["as it is"].bias is None
    assert found["alibi"].bias == biases.alibi(SLOPES)
    for name in ("signed alibi", "relative", "distance"):
        bias = found[name].bias
        assert bias is not None
        assert bias.tensors()[0].numel() <= H * 2 * N
    assert found["soft-cap"].softcap == 2.0
    assert found["hidden"].mask == found["all of it"].mask == masks.causal()
    assert found["hidden"].bias is None


@pytest.mark.parametrize(
    ("mod", "says"),
    [
        (lambda s, b, h, q, k: s.clamp(max=3), "clamp of the score cannot be said"),
        (lambda s, b, h, q, k: s * s, "mul takes the score more than once"),
        (lambda s, b, h, q, k: s * SLOPES[h], "something that is not a constant"),
        (lambda s, b, h, q, k: torch.where(q >= k, s, -1e9), "where of the score"),
        (lambda s, b, h, q, k: torch.tanh(s + h), "tanh of the score"),
        (lambda s, b, h, q, k: soft(soft(s)), "tanh of the score"),
        (lambda s, b, h, q, k: s.bfloat16(), "_to_copy of the score"),
        (lambda s, b, h, q, k: SLOPES[h], "does not depend on the score"),
    ],
)
def test_score_mods_that_a_trace_cannot_hold_are_refused_with_the_layer(
    mod: Mod, says: str
) -> None:
    model = nn.Sequential()
    model.add_module("first", Flex(score_mod=mod))
    model.forward = lambda *given: model.first(*given)
    refused = pytest.raises(RegardError, match=f"(?s)^first calls flex_attention: .*{says}")
    with refused, torch.no_grad(), regard.watch(model):
        model(*qkv())


def test_a_layer_that_cannot_be_traced_can_be_left_out() -> None:
    model = nn.ModuleList([Flex(score_mod=lambda s, b, h, q, k: s.clamp(max=3)), Flex()])
    model.forward = lambda *given: [layer(*given) for layer in model]
    with torch.no_grad():
        want = model(*qkv())
        with regard.watch(model, layers=["1"]) as seen:
            got = model(*qkv())
    assert list(seen) == ["1"]
    assert torch.equal(got[0], want[0])


def test_a_bias_too_large_to_write_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.watching.flex.score_mods.LARGEST", N * N)
    change_of(SCORES["alibi"], SHAPE, CPU)
    with pytest.raises(RegardError, match="too large to be written out"):
        change_of(SCORES["dense"], SHAPE, CPU)


def blocks(function: Mod, n: int = 300, **how: Any) -> BlockMask:
    return create_block_mask(function, B, H, n, n, device="cpu", **how)


@pytest.mark.parametrize("groups", [H, 2, 1])
def test_block_masks_scale_and_grouped_heads(groups: int) -> None:
    q, k, v = qkv(300, groups)
    how = {"block_mask": blocks(causal), "scale": 0.3, "enable_gqa": groups < H}
    model = Flex(**how, kernel_options={"BLOCK_M": 64})
    with torch.no_grad():
        want = model(q, k, v)
        with regard.watch(model, keep="traces") as seen:
            torch.testing.assert_close(model(q, k, v), want)
    trace = seen[""].trace
    assert trace.mask == masks.causal()
    assert trace.inputs.k.shape[1] == groups
    every = k.repeat_interleave(H // groups, 1)
    allowed = torch.ones(300, 300, dtype=torch.bool).tril()
    torch.testing.assert_close(
        trace.weights().double(), weights_of(q * 0.3 * 4, every, None, allowed), atol=2e-6,
        rtol=2e-5,
    )  # fmt: skip


def test_the_output_lies_in_memory_as_it_did() -> None:
    wide = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv()]
    model = Flex()
    with torch.no_grad():
        want = model(*wide)
        with regard.watch(model):
            got = model(*wide)
    assert got.stride() == want.stride()
    got.transpose(1, 2).view(B, N, -1)


@pytest.mark.parametrize("aux", [{"return_lse": True}, {"return_aux": AuxRequest(lse=True)}])
def test_what_else_was_asked_for_is_flex_attentions_own(aux: dict[str, Any]) -> None:
    model, given = Flex(**aux, score_mod=SCORES["alibi"]), qkv()
    with torch.no_grad():
        want, more = model(*given)
        with regard.watch(model, keep="traces") as seen:
            got, again = model(*given)
    assert torch.equal(got, want)
    lse, other = (m.lse if "return_aux" in aux else m for m in (more, again))
    assert torch.equal(lse, other)
    torch.testing.assert_close(seen[""].trace.lse, lse)


def test_where_gradients_are_wanted_the_answer_is_flex_attentions_own() -> None:
    slopes = nn.Parameter(SLOPES.clone())

    def learned(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s - slopes[h] * (q - k).abs()

    model, given = Flex(score_mod=learned), qkv()
    want = model(*given)
    with regard.watch(model, keep="traces") as seen:
        got = model(*given)
    assert torch.equal(got, want)
    assert got.requires_grad == want.requires_grad
    assert seen[""].trace.out.grad_fn is None
    assert seen[""].trace.inputs.bias == biases.alibi(SLOPES, offset=0)


def refusal(model: nn.Module, given: list[Tensor], watching: Any) -> str:
    # Without a GPU there are no gradients, which is one of the refusals.
    with pytest.raises((ValueError, NotImplementedError), match=r".") as error, watching:
        model(*given)
    return str(error.value)


def test_calls_that_flex_attention_refuses_stay_refused() -> None:
    q, k, v = qkv(groups=2)
    short = qkv(200)
    learning = [t.requires_grad_() for t in qkv()]
    for given, how in (
        ([q, k, v], {}),
        (short, {"block_mask": blocks(causal)}),
        (learning, {}),
    ):
        model = Flex(**how)
        errors = [refusal(model, given, contextlib.nullcontext())]
        errors.append(refusal(model, given, regard.watch(model)))
        assert errors[0] == errors[1]
    model = Flex(wrong=1)
    with pytest.raises(TypeError), regard.watch(model):
        model(*qkv())


def function() -> tuple[Any, ...]:
    return (
        flex_attention.__code__, flex_attention.__defaults__, flex_attention.__kwdefaults__,
        dict(vars(flex_attention)), module.flex_attention,
    )  # fmt: skip


def test_nothing_is_left_behind() -> None:
    model, before = Flex(), function()
    with torch.no_grad(), regard.watch(model) as seen:
        assert function() == before, "only while the model runs"
        model(*qkv())
    assert seen[""].calls == 1
    assert function() == before
    failing = Flex(score_mod=lambda s, b, h, q, k: s.clamp(max=3))
    with pytest.raises(RegardError), torch.no_grad(), regard.watch(failing):
        failing(*qkv())
    assert function() == before
    assert flex_calls._watching == []


def test_other_threads_are_not_seen() -> None:
    answers: list[Tensor] = []
    given = qkv()

    class Both(nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            def elsewhere() -> None:
                with torch.no_grad():
                    answers.append(flex_attention(*given))

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return flex_attention(*given)

    model = Both()
    with torch.no_grad(), regard.watch(model) as seen:
        model(*given)
    assert len(answers) == 1
    assert seen[""].calls == 1


def test_masks_are_read_once_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    monkeypatch.setattr(flex_calls, "mask_of_blocks", lambda *given, **how: reads.append(given))
    layers = [Flex(block_mask=blocks(causal)) for _ in range(3)]
    for layer in layers:
        layer.how = layers[0].how
    model = nn.ModuleList(layers)
    model.forward = lambda *given: [layer(*given) for layer in layers]
    with torch.no_grad(), regard.watch(model) as seen:
        model(*qkv(300))
        assert len(reads) == 1
        model(*qkv(300))
    assert len(reads) == 2
    assert [layer.calls for layer in seen.values()] == [2, 2, 2]


def test_lists_of_blocks_count_where_the_compiler_runs() -> None:
    layout = torch.tensor([[True, False, True], [False, True, True], [True, True, True]])
    order = layout.int().argsort(dim=-1, descending=True, stable=True).int()
    sparse = BlockMask.from_kv_blocks(
        layout.sum(-1, dtype=torch.int32)[None, None], order[None, None], seq_lengths=(300, 300)
    )
    shape = Shape(B, H, 300, 300)
    listed = mask_mods.mask_of_blocks(sparse, shape, CPU, compiled=True)
    assert listed == masks.blocks(layout[None, None], 128)
    assert mask_mods.mask_of_blocks(sparse, shape, CPU, compiled=False) is None
    usual = blocks(causal)
    assert mask_mods.mask_of_blocks(usual, shape, CPU, compiled=True) == masks.causal()
    rectangles = blocks(causal, BLOCK_SIZE=(128, 64))
    assert mask_mods.mask_of_blocks(rectangles, shape, CPU, compiled=True) == masks.causal()
    # Full blocks are not asked: where they contradict mask_mod, they win.
    odd = BlockMask.from_kv_blocks(
        usual.kv_num_blocks, usual.kv_indices, usual.full_kv_num_blocks, usual.full_kv_indices,
        mask_mod=lambda b, h, q, k: (q >= k) & (q - k < 9), seq_lengths=(300, 300),
    )  # fmt: skip
    mask = mask_mods.mask_of_blocks(odd, shape, CPU, compiled=True)
    assert mask is not None
    row = mask.bind(shape, CPU).dense(300)[0, 0, 200]
    assert row.nonzero().flatten().tolist() == [*range(128), *range(192, 201)]


@pytest.mark.compiled
@pytest.mark.skipif(
    VECTORS not in ("AVX2", "AVX512"), reason="PyTorch compiles FlexAttention for AVX2 alone"
)
@pytest.mark.parametrize(
    "how", [{}, {"fullgraph": True, "dynamic": False}], ids=["compiled", "one graph"]
)
def test_compiled_wrappers_are_seen(how: dict[str, bool]) -> None:
    given, attend = qkv(300), torch.compile(flex_attention, **how)
    model = Flex(attend, block_mask=blocks(causal), score_mod=SCORES["soft-cap"])
    with torch.no_grad():
        want = model(*given)
        with regard.watch(model, keep="traces") as seen:
            got = [model(*given) for _ in range(2)]
        after = model(*given)
    for answer in (*got, after):
        assert torch.equal(answer, want)
    traces = seen[""].traces
    assert len(traces) == 2
    assert traces[0].mask == masks.causal()
    assert traces[0].inputs.softcap == 2.0


@pytest.mark.compiled
@pytest.mark.parametrize("when", ["before", "inside"])
def test_compiled_models(when: str) -> None:
    class Around(Flex):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return super().forward(q.cos(), k, v).sin()

    given, model = qkv(300), Around(block_mask=blocks(causal))
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        want = model(*given)
        if when == "before":
            compiled(*given)
        with regard.watch(compiled, keep="traces") as seen:
            torch.testing.assert_close(compiled(*given), want)
            compiled(*given)
        torch.testing.assert_close(compiled(*given), want)
    assert [trace.mask for trace in seen["_orig_mod"].traces] == [masks.causal()] * 2


@pytest.mark.compiled
def test_a_compiled_model_in_one_graph_says_how_to_watch_it() -> None:
    model = torch.compile(Flex(), backend="aot_eager", fullgraph=True)
    refused = pytest.raises(Exception, match="compile without fullgraph=True to watch")
    with refused, torch.no_grad(), regard.watch(model):
        model(*qkv())
    assert flex_calls._watching == []
