"""Interventions do what theory says, and what n×n attention does that is changed by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
)

import regard
from regard import RegardError, biases, interpret, masks
from regard.interpret import metrics
from regard.interpret.interventions import Activations, Cut, Patched, Replaced
from regard.interpret.interventions.effects import effects
from tests.interpret import constructed
from tests.interpret.constructed import (
    LOUD,
    Constructed,
    Dense,
    Layer,
    copies_from,
    induction,
    looks_at,
    previous_token,
)
from tests.watching.left_behind import nothing_in, nothing_in_the_process

close: Callable[..., None] = torch.testing.assert_close


def induces() -> Constructed:
    """A pair of heads that copies, and in each layer one that only looks."""
    return Constructed(Layer(previous_token(), looks_at(0)), Layer(looks_at(0), induction())).eval()


def said_twice(seed: int, sequences: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    words = torch.stack([torch.randperm(8, generator=g)[:6] for _ in range(sequences)])
    return torch.cat([words, words], 1)[:, :-1]


def foreseen(text: Tensor) -> Any:
    """The logit of the token that comes next, at the end of a text said twice."""
    return lambda output: output[:, -1].gather(1, text[:, 5:6])[:, 0]


TEXTS = [said_twice(seed) for seed in range(4)]
METRIC = [foreseen(text) for text in TEXTS]


def test_both_heads_of_an_induction_pair_matter_and_no_other() -> None:
    found = interpret.ablate(induces(), TEXTS, METRIC)
    effect = {row.what: row.effect for row in found}
    assert effect.keys() == {f"layers.{i} head {h}" for i in (0, 1) for h in (0, 1)}
    close(effect["layers.1 head 1"], -LOUD, atol=1e-4, rtol=0)
    # Without the first of the pair the second finds nothing to look for: it looks everywhere.
    assert effect["layers.0 head 0"] < -0.7 * LOUD
    assert effect["layers.0 head 1"] == effect["layers.1 head 0"] == 0
    rows = {row.what: row for row in found}
    assert rows["layers.1 head 1"].certain
    assert not rows["layers.0 head 1"].certain
    assert found.sorted()[0].what == "layers.1 head 1"


def test_a_head_that_looks_at_what_it_does_not_use() -> None:
    model, text = induces(), TEXTS[0]
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        model(text)
    assert seen["layers.1"].trace.weights(heads=0)[0, 0, -1, 0] > 0.99
    for softmax in ("before", "after"):
        found = interpret.knock_out(model, TEXTS, METRIC, (-1, 0), heads=[(1, 0)], softmax=softmax)
        assert found[0].effect == 0
    used = interpret.knock_out(model, TEXTS, METRIC, [(-1, 5), (-1, 3)], heads=[(1, 1)])
    close([row.effect for row in used], [-LOUD, 0.0], atol=0.3, rtol=0)


def test_the_edge_to_the_token_before_is_the_one_that_counts() -> None:
    """At place 5 the first layer notes the token before; the end looks for it."""
    found = interpret.knock_out(
        induces(), TEXTS, METRIC, [(5, 4), (5, 3), ([4, 5], range(3, 5))], layers="layers.0"
    )
    assert found[0].effect < -0.7 * LOUD
    assert abs(found[1].effect) < 1e-4
    assert found[2].effect < -0.7 * LOUD
    assert found[2].what == "[4, 5] → 3–4"


def test_before_and_after_softmax_differ_as_they_should() -> None:
    """A head that looks everywhere alike: what is left is a mean over fewer, or the same less one
    part."""
    head = constructed.Head().reads(constructed.TOKEN, constructed.OUT)
    model, text = Constructed(Layer(head)).eval(), torch.tensor([[1, 2, 3, 4]])
    for softmax, want in (("before", 1 / 3), ("after", 1 / 4)):
        found = interpret.knock_out(
            model, text, lambda output: output[:, -1, 1], [(3, 1), (3, 0)], softmax=softmax
        )
        close([row.changed for row in found], [want, 0.0], atol=1e-6, rtol=0)
        close(found[0].clean, 0.25)


def test_a_copying_head_carries_the_difference_in_its_values() -> None:
    model = Constructed(Layer(looks_at(1), copies_from(0))).eval()
    texts, sources = torch.tensor([[1, 3, 4], [2, 3, 5]]), torch.tensor([[6, 3, 4], [7, 3, 5]])
    metric = metrics.logit_difference(sources[:, 0], texts[:, 0])
    for what, share in (
        ("outputs", 1.0), ("values", 1.0), ("keys", 0.0), ("queries", 0.0), ("patterns", 0.0),
    ):  # fmt: skip
        found = interpret.patch(model, texts, sources, metric, what=what)
        recovered = [row.recovered for row in found]
        close(recovered, [0.0, share], atol=1e-5, rtol=0)
    at_first = interpret.patch(model, texts, sources, metric, what="values", places=0)
    elsewhere = interpret.patch(model, texts, sources, metric, what="values", places=[1, 2])
    close([at_first[1].recovered, elsewhere[1].recovered], [1.0, 0.0], atol=1e-5, rtol=0)


def test_the_pattern_of_an_induction_head_is_what_the_source_says() -> None:
    """Given where it looked in a text said in another order, it copies what stands there."""
    model = induces()
    text = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]])
    source = torch.tensor([[0, 1, 5, 3, 4, 2, 0, 1, 5]])
    with torch.no_grad():
        where = model(source)[0, -1].argmax()
    assert where == 3
    found = interpret.patch(
        model, text, torch.tensor([[0, 1, 2, 3, 4, 5, 3, 1, 4]]), metrics.probability(5),
        what="patterns", heads=[(1, 1)],
    )  # fmt: skip
    assert found[0].clean < 0.1
    assert found[0].changed > 0.9


def test_mean_and_resample_keep_what_is_always_the_same() -> None:
    """A head that copies what all texts begin with is not missed but where it is set to zero."""
    model = Constructed(Layer(copies_from(0))).eval()
    texts = torch.tensor([[1, 2, 3], [1, 4, 5], [1, 6, 7]])
    for by, want in (("zero", -LOUD), ("mean", 0.0), ("resample", 0.0)):
        found = interpret.ablate(model, texts, lambda output: output[:, -1, 1], by=by)
        close(found[0].effect, want, atol=1e-5, rtol=0)
    texts[0, 0] = 2
    found = interpret.ablate(model, texts, lambda output: output[:, -1, 2], by="mean")
    close(
        found[0].each,
        torch.tensor([LOUD / 3 - LOUD, LOUD / 3, LOUD / 3]).double(),
        atol=1e-5,
        rtol=0,
    )
    found = interpret.ablate(model, texts, lambda output: output[:, -1, 2], by="resample")
    assert sorted(found[0].each.round().tolist()) == [-LOUD, 0, LOUD]


def dense_model() -> tuple[Dense, Tensor, Tensor]:
    torch.manual_seed(0)
    return Dense().double().eval(), *torch.randn(2, 2, 7, 32, dtype=torch.float64)


def run(model: nn.Module, x: Tensor, *changes: Any) -> Tensor:
    with torch.no_grad(), interpret.intervene(model, *changes):
        return model(x)


HEADS = {"layers.1": [0, 3], "layers.2": [1]}


def per_layer(heads: Any, i: int) -> list[int]:
    return list(heads.get(f"layers.{i}", []))


def test_outputs_are_replaced_as_by_hand() -> None:
    model, x, _ = dense_model()

    def after(i: int, out: Tensor, p: Tensor, v: Tensor) -> Tensor:
        out = out.clone()
        out[:, per_layer(HEADS, i)] = 0
        return out

    close(run(model, x, Replaced(HEADS)), model.dense(x, after=after)[0])


@pytest.mark.parametrize("softmax", ["before", "after"])
@pytest.mark.parametrize(
    "edges",
    [
        (3, 1),
        [(3, 1), (-1, slice(0, 3)), ([2, 3], [1, 2])],
        [(i, i - 1) for i in range(1, 7)] + [(i, 0) for i in range(7)],
        masks.window(1),
        (None, None),
    ],
    ids=["one", "blocks", "many", "mask", "all"],
)
def test_edges_are_cut_as_by_hand(edges: Any, softmax: Any) -> None:
    model, x, _ = dense_model()
    table = torch.zeros(7, 7, dtype=torch.bool)
    if isinstance(edges, masks.Mask):
        table = edges.dense(7)[0, 0]
    else:
        for q, k in [edges] if isinstance(edges, tuple) else edges:
            q, k = (torch.arange(7) if one is None else torch.arange(7)[one] for one in (q, k))
            table[q.reshape(-1, 1), k.reshape(1, -1)] = True

    def change(i: int, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Any:
        allowed = allowed.clone()
        if softmax == "before":
            for h in per_layer(HEADS, i):
                allowed[:, h] &= ~table
        return q, k, v, allowed

    def after(i: int, out: Tensor, p: Tensor, v: Tensor) -> Tensor:
        out = out.clone()
        if softmax == "after":
            for h in per_layer(HEADS, i):
                out[:, h] -= (p[:, h] * table) @ v[:, h]
        return out

    want, _ = model.dense(x, change, after)
    close(run(model, x, Cut(HEADS, edges, softmax)), want)


def test_a_pair_that_several_cut_after_softmax_is_taken_off_once() -> None:
    model, x, _ = dense_model()
    first, all_of_last = (None, [0, 1]), (-1, None)
    some, more = Cut(HEADS, first, "after"), Cut({"layers.1": [0]}, all_of_last, "after")
    apart = Cut({"layers.1": [3], "layers.2": [1]}, first, "after")
    together = Cut({"layers.1": [0]}, [first, all_of_last], "after")
    close(run(model, x, some, more), run(model, x, together, apart))
    close(run(model, x, some, some), run(model, x, some))


class FloatMask(nn.Module):
    """Causal by a mask of numbers that are added."""

    def __init__(self, hides: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.hides = nn.Linear(32, 96), hides

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind()
        mask = torch.full((x.shape[1], x.shape[1]), self.hides).triu(1)
        # What a text is padded to sees nothing at all.
        mask[-1] = self.hides
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("hides", [torch.finfo(torch.float32).min, -1e9, -1e4])
def test_a_cut_opens_nothing_that_a_finite_mask_hides(hides: float) -> None:
    """The first token of a causal model sees nothing else, once it is cut from itself."""
    model, x = FloatMask(hides), torch.randn(1, 8, 32)
    cut = Cut({"": [0, 1, 2, 3]}, (None, 0))
    found, want = run(model, x, cut), run(FloatMask(-math.inf), x, cut)
    assert not found[0, 0].any()
    close(found[:, :-1], want[:, :-1])
    # A row that saw nothing else before goes on as it did, without what is cut.
    assert found[0, -1].any()


def test_a_cut_leaves_rows_alone_that_a_mask_and_a_bias_hide_together() -> None:
    """Of texts that are padded on the left, where the bias shows keys that the mask hides."""

    class Padded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(-1, (2, 8)).transpose(1, 2)
            padding = biases.dense(torch.where(torch.arange(6) < 2, -1e9, 0.0)[None, None, None])
            out = regard.attention(q, q, q, bias=padding, mask=masks.causal())
            return out.transpose(1, 2).flatten(2)

    model, x = Padded(), torch.randn(1, 6, 16)
    changed = (run(model, x, Cut({"": [0, 1]}, (5, 4))) - model(x)).abs().amax(-1)
    assert (changed > 0.01).tolist() == [[False] * 5 + [True]]


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_program_that_is_recorded_is_that_of_the_changed_model() -> None:
    model, x = FloatMask(-math.inf), torch.randn(2, 7, 32)
    silent = Replaced({"": [0, 2]})
    want = run(model, x, silent)
    with torch.no_grad(), interpret.intervene(model, silent):
        program = torch.jit.trace(model, x, check_trace=False)
    close(program(x), want)
    assert not torch.allclose(want, model(x))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("what", ["outputs", "queries", "keys", "values", "patterns"])
@pytest.mark.parametrize("at", [None, [1, 4]])
def test_activations_are_patched_as_by_hand(what: Any, at: Any, frozen: bool) -> None:
    model, x, other = dense_model()
    if what == "patterns" and at is not None:
        pytest.skip("refused")
    _, had = model.dense(other)
    _, own = model.dense(x)
    names = {"queries": "q", "keys": "k", "values": "v"}
    places = torch.arange(7) if at is None else torch.tensor(at)

    def change(i: int, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Any:
        now = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
        if frozen:
            now |= {"q": own[i]["q"].clone(), "k": own[i]["k"].clone()}
        mine = torch.tensor(per_layer(HEADS, i), dtype=torch.int64)
        for name in ("q", "k") if what == "patterns" else filter(None, [names.get(what)]):
            now[name][:, mine[:, None], places] = had[i][name][:, mine[:, None], places]
        return *now.values(), allowed

    def after(i: int, out: Tensor, p: Tensor, v: Tensor) -> Tensor:
        out = out.clone()
        mine = torch.tensor(per_layer(HEADS, i), dtype=torch.int64)
        if what == "outputs":
            out[:, mine[:, None], places] = had[i]["out"][:, mine[:, None], places]
        return out

    want, _ = model.dense(x, change, after)
    with torch.no_grad():
        found = {}
        for name, text in (("own", x), ("other", other)):
            with regard.watch(model, keep="traces") as seen:
                model(text)
            found[name] = {(path, 0): Activations.of(layer.trace) for path, layer in seen.items()}
    every = {f"layers.{i}": list(range(4)) for i in range(3)}
    changes = [Patched(every, "patterns", found["own"])] if frozen else []
    close(run(model, x, *changes, Patched(HEADS, what, found["other"], at)), want)


def test_the_tables_are_those_of_runs_by_hand() -> None:
    model, x, other = dense_model()
    metric = lambda output: output.square().mean((1, 2))  # noqa: E731
    _, had = model.dense(other)

    def silent(layer: int, head: int) -> Any:
        def after(i: int, out: Tensor, p: Tensor, v: Tensor) -> Tensor:
            keep = torch.ones(4, dtype=out.dtype)
            keep[head] = i != layer
            return out * keep.view(1, -1, 1, 1)

        return after

    clean = metric(model.dense(x)[0])
    table = interpret.ablate(model, x, metric, progress=lambda *_: None)
    assert len(table) == 12
    for row, (i, h) in zip(table, ((i, h) for i in range(3) for h in range(4)), strict=True):
        want = metric(model.dense(x, after=silent(i, h))[0]) - clean
        close(row.each, want.detach())
        assert row.heads == {f"layers.{i}": [h]}
    together = interpret.ablate(model, x, metric, heads=[[(0, 1), (2, 3)], (1, 1)])
    assert [len(row.heads) for row in together] == [2, 1]
    patched = interpret.patch(model, x, other, metric, heads=[(0, 2)])

    def given(i: int, out: Tensor, p: Tensor, v: Tensor) -> Tensor:
        out = out.clone()
        if i == 0:
            out[:, 2] = had[0]["out"][:, 2]
        return out

    close(patched[0].each, (metric(model.dense(x, after=given)[0]) - clean).detach())
    between = (metric(model.dense(other)[0]) - clean).mean().item()
    close(patched[0].recovered, patched[0].effect / between)


def test_each_layer_or_head_apart() -> None:
    model, x, _ = dense_model()
    metric = lambda output: output.mean((1, 2))  # noqa: E731
    layers = interpret.knock_out(model, x, metric, (None, 0), each="layer")
    assert [row.what for row in layers] == [f"layers.{i}: all → 0" for i in range(3)]
    heads = interpret.knock_out(model, x, metric, (None, 0), each="head", layers="*.2")
    assert heads[3].what == "layers.2 head 3: all → 0"
    by_text = interpret.knock_out(model, x, metric, lambda text: [(len(text), 0)])
    assert by_text[0].effect == interpret.knock_out(model, x, metric, (2, 0))[0].effect


def test_batches_change_nothing() -> None:
    model, x, other = dense_model()
    metric = lambda output: output.square().mean((1, 2))  # noqa: E731
    one, many = (interpret.ablate(model, [x, other], metric, batch=n) for n in (1, None))
    close([row.effect for row in one], [row.effect for row in many])
    assert one.texts == many.texts == 4


def test_a_model_whose_sequences_depend_on_each_other_is_run_one_by_one() -> None:
    class Mixed(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.sizes = model, []

        def forward(self, x: Tensor) -> Tensor:
            self.sizes.append(len(x))
            y = self.model(x)
            return y - y.mean(0) * len(y) + y

    model, x, _ = dense_model()
    mixed = Mixed(model).eval()
    metric = lambda output: output.square().mean()  # noqa: E731
    many = interpret.ablate(mixed, x, metric)
    assert max(mixed.sizes) > 2
    one = interpret.ablate(mixed, x, metric, batch=1)
    assert [row.effect for row in one] == [row.effect for row in many]


class Said(NamedTuple):
    logits: Tensor


@dataclass
class Told:
    logits: Tensor


class Kept:
    """An output of a class that nobody knows."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@pytest.mark.parametrize("kind", [Said, Told, Kept])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("which", [0, slice(None)])
def test_outputs_of_any_class_are_told_apart(kind: Any, scale: float, which: Any) -> None:
    class Wrapped(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Any:
            return kind(self.model(x))

    model, x, _ = dense_model()
    wrapped = Wrapped(model).eval()
    metric = lambda output: scale * output.logits[which, -1, 0]  # noqa: E731
    one, many = (interpret.ablate(wrapped, x[:1], metric, batch=n) for n in (1, None))
    close([row.effect for row in one], [row.effect for row in many], rtol=1e-4, atol=1e-6 * scale)


@pytest.mark.parametrize("sequences", [1, 3, 8])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_batches_that_are_not_the_first_axis(sequences: int, scale: float) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, metric = torch.randn(5, sequences, 16), lambda output: scale * output[-1, :, 0]
    one, many = (interpret.ablate(model, x, metric, batch=n) for n in (1, None))
    close([row.effect for row in one], [row.effect for row in many], rtol=1e-4, atol=1e-6 * scale)


class Reads(nn.Module):
    """One attention call of somebody's, and what it is made of."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True) if "multi" in how else None

    def forward(self, x: Tensor) -> Tensor:
        if self.attn is not None:
            out, weights = self.attn(x, x, x, need_weights="weights" in self.how)
            return out if weights is None else torch.cat([out, weights], -1)
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        if self.how == "flex":
            out = flex_attention(q, q, q)
        elif self.how == "sdpa":
            out = nn.functional.scaled_dot_product_attention(q, q, q)
        else:
            out = regard.attention(q, q, q, backend=self.how)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "how", ["sdpa", "flex", "tiled", "reference", "multihead", "multihead with weights"]
)
@pytest.mark.parametrize("grad", [False, True])
def test_whoever_computes_attention(how: str, grad: bool) -> None:
    if how == "flex" and grad:
        pytest.skip("FlexAttention has no gradients on a CPU")
    torch.manual_seed(0)
    model, x = Reads(how).eval(), torch.randn(2, 5, 16)
    path = "attn" if "multi" in how else ""
    with torch.set_grad_enabled(grad):
        x = x.requires_grad_(grad)
        before = model(x)
        with interpret.intervene(model, Replaced({path: [0]})):
            silent = model(x)
        with interpret.intervene(model, Cut({path: [0, 1]}, (None, 0))):
            cut = model(x)
        with interpret.intervene(model):
            close(model(x), before)
        close(model(x), before)
    if model.attn is None:
        assert not silent[..., :8].any()
        close(silent[..., 8:], before[..., 8:])
        first = x.clone()
        q = first.unflatten(-1, (2, 8)).transpose(1, 2)
        want = nn.functional.scaled_dot_product_attention(q, q[:, :, 1:], q[:, :, 1:])
        close(cut, want.transpose(1, 2).flatten(2))
    elif "weights" in how:
        close(silent[..., 16:], before[..., 16:])
    if grad:
        silent.sum().backward()
        assert x.grad is not None
        assert x.grad.any()
    nothing_in(model)
    nothing_in_the_process()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_hugging_face_models() -> None:
    model = llama()
    texts = [{"input_ids": torch.randint(3, 32, (1, 9))} for _ in range(3)]
    before = [model(**text).logits for text in texts]
    saved = copy.deepcopy(model.state_dict())
    told: list[tuple[int, int]] = []
    found = interpret.ablate(model, texts, metrics.kl(), progress=lambda *done: told.append(done))
    assert len(found) == 8
    assert all(row.effect > 0 and row.clean == 0 for row in found)
    assert told[-1] == (24, 24)
    lost = interpret.knock_out(model, texts, metrics.loss(), [(8, 0), (8, 3)])
    assert not any(row.effect for row in lost), "the last row predicts nothing of the text"
    assert interpret.knock_out(model, texts, metrics.loss(start=4), (4, 2))[0].effect != 0
    # By hand: the output projection's columns of a head are 0.
    hand = llama()
    with torch.no_grad():
        hand.model.layers[1].self_attn.o_proj.weight[:, 8:16] = 0
        want = hand(**texts[0]).logits
        with interpret.intervene(model, Replaced({"model.layers.1.self_attn": [1]})):
            close(model(**texts[0]).logits, want)
            written = model.generate(**texts[0], max_new_tokens=3, do_sample=False, pad_token_id=0)
        same = hand.generate(**texts[0], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(written, same)
    for text, was in zip(texts, before, strict=True):
        assert torch.equal(model(**text).logits, was)
    assert all(
        torch.equal(a, b) for a, b in zip(saved.values(), model.state_dict().values(), strict=True)
    )
    nothing_in(model)
    nothing_in_the_process()


def test_nothing_stays_after_an_exception() -> None:
    model, x, _ = dense_model()
    before = model(x)
    keys = set(vars(model))

    def breaks(output: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interpret.ablate(model, x, breaks)
    with pytest.raises(RegardError, match="no such head"):
        run(model, x, Replaced({"layers.0": [9]}))

    def interrupted() -> None:
        with interpret.intervene(model, Replaced(HEADS)):
            model(x)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(model(x), before)
    assert set(vars(model)) == keys
    nothing_in(model)
    nothing_in_the_process()


def test_a_watch_inside_sees_calls_as_they_were_made() -> None:
    model, x, _ = dense_model()
    with (
        torch.no_grad(),
        interpret.intervene(model, Replaced({"layers.0": [0, 1, 2, 3]})),
        regard.watch(model, keep="traces") as seen,
    ):
        out = model(x)
    close(out, run(model, x, Replaced({"layers.0": [0, 1, 2, 3]})))
    assert seen["layers.0"].trace.out.any()


@pytest.mark.parametrize(
    "other", [Cut({"layers.1": [3, 2]}, (None, 1)), Replaced({"layers.1": [1]})]
)
def test_what_is_in_force_stays_so_inside_of_another(other: Any) -> None:
    model, x, _ = dense_model()
    first = Cut(HEADS, (None, 0))
    want = run(model, x, first, other)
    with torch.no_grad(), interpret.intervene(model, first):
        close(run(model, x, other), want)
        close(model(x), run(model, x))
    with torch.no_grad(), interpret.intervene(model, other):
        close(run(model, x, first), want)
    layer = Cut({"": [0, 3]}, (None, 0))
    with torch.no_grad(), interpret.intervene(model.layers[1], layer):
        close(run(model, x, Cut({"layers.2": [1]}, (None, 0)), other), want)


def test_tables_inside_of_what_is_in_force() -> None:
    model, x, _ = dense_model()
    first, metric = Cut(HEADS, (None, 0)), lambda out: out[:, -1, 0]
    with interpret.intervene(model, first):
        table = interpret.ablate(model, x, metric, layers="layers.1", batch=3)
    for head, row in enumerate(table):
        silent = run(model, x, first, Replaced({"layers.1": [head]}))
        close(row.each, metric(silent) - metric(run(model, x, first)))


def test_layers_that_are_not_there_are_named() -> None:
    model, x, _ = dense_model()
    with pytest.raises(
        RegardError, match=r"in which no attention ran[\s\S]*'nowhere'[\s\S]*'layers.0'"
    ):
        run(model, x, Replaced({"nowhere": [0], "layers.1": [0]}))


def test_what_is_checkpointed_is_changed_again() -> None:
    model, x, _ = dense_model()
    silent = Replaced(HEADS)
    found = []
    for checkpointed in (False, True):
        model.zero_grad()
        with interpret.intervene(model, silent):
            given = x.clone().requires_grad_()
            out = checkpoint(model, given, use_reentrant=False) if checkpointed else model(given)
            out.square().mean().backward()
        found.append((out.detach(), given.grad, model.q[1].weight.grad.clone()))
    close(*found)


def test_a_model_learns_around_what_is_cut() -> None:
    model, x, _ = dense_model()
    with interpret.intervene(model, Cut(HEADS, (None, 0), "after"), Replaced({"layers.0": [0]})):
        model(x).square().mean().backward()
    assert model.q[1].weight.grad is not None
    assert not model.q[0].weight.grad[:8].any()
    assert model.q[0].weight.grad[8:].any()


def test_tables() -> None:
    clean = torch.zeros(50, dtype=torch.float64)
    noise = torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    changed = torch.stack([1 + 0.1 * noise, noise - noise.mean()])
    found = effects("cut <b>", "loss", [("a", {}), ("b", {})], clean, changed)
    assert found[0].low < 1 < found[0].high
    assert found[0].high - found[0].low < 0.1
    # The interval of a mean: two standard errors to each side.
    close(
        found[0].high - found[0].low,
        2 * 1.96 * float(changed[0].std()) / 50**0.5,
        rtol=0.15,
        atol=0,
    )
    close(found[0].size, float(changed[0].mean() / changed[0].std()))
    assert found[0].certain
    assert not found[1].certain
    assert found[:1].rows == found.rows[:1]
    text = repr(found)
    assert "95 % interval" in text
    assert text.splitlines()[-1].startswith("50 texts")
    assert "cut &lt;b&gt;" in found._repr_html_()
    assert found.records()[0]["texts"] == 50
    alone = effects("cut", "loss", [("a", {})], clean[:1], changed[:1, :1])
    assert math.isnan(alone[0].low)
    assert "1 text: no interval" in repr(alone)
    few = effects("cut", "loss", [("a", {})], clean[:9], changed[:1, :9])
    assert "9 texts: intervals are too narrow for so few" in repr(few)
    assert "narrow" not in repr(effects("cut", "loss", [("a", {})], clean[:10], changed[:1, :10]))
    many = effects("x", "loss", [(str(i), {}) for i in range(40)], clean, changed[:1].repeat(40, 1))
    assert "… and 20 more" in repr(many)
    assert effects("x", "loss", [("a", {})], clean, changed[:1]) != found
    again = effects("cut <b>", "loss", [("a", {}), ("b", {})], clean, changed)
    assert [row.low for row in again] == [row.low for row in found]


@pytest.mark.parametrize("lost", [math.inf, -math.inf, math.nan])
def test_an_effect_that_is_no_number_has_no_interval(lost: float) -> None:
    clean = torch.zeros(2, dtype=torch.float64)
    (found,) = effects("cut", "loss", [("a", {})], clean, torch.tensor([[lost, 1.0]]).double())
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert not found.certain


def test_metrics() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0]]])
    ids = torch.tensor([[0, 1]])
    outcome = metrics.Outcome(logits, ids, torch.zeros_like(logits))
    close(metrics.loss().of(outcome), torch.tensor([math.log(4 / 3)]))
    close(metrics.probability(1, at=0).of(outcome), torch.tensor([0.75]))
    want = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    close(metrics.kl(at=0).of(outcome), torch.tensor([want]))
    close(metrics.kl().of(outcome), torch.tensor([want / 2]))
    padded = {"input_ids": torch.tensor([[0, 1, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    longer = torch.cat([logits, logits[:, :1]], 1)
    close(
        metrics.loss().of(metrics.Outcome(longer, padded, longer)), torch.tensor([math.log(4 / 3)])
    )


def test_metrics_are_as_exact_as_logits() -> None:
    source = torch.Generator().manual_seed(0)
    logits, clean = torch.randn(2, 1, 5, 50, generator=source, dtype=torch.float64)
    ids = torch.randint(50, (1, 5), generator=source)
    several = [
        metrics.loss(), metrics.kl(), metrics.kl(at=2), metrics.probability(3),
        metrics.log_odds(3), metrics.logit_difference(3, 4),
    ]  # fmt: skip
    for metric in several:
        exact = metric.of(metrics.Outcome(logits, ids, clean))
        assert exact.dtype == torch.float64, metric.name
        given = [t.bfloat16() for t in (logits, clean)]
        found = metric.of(metrics.Outcome(given[0], ids, given[1]))
        want = metric.of(metrics.Outcome(given[0].double(), ids, given[1].double()))
        assert found.dtype == torch.float32, metric.name
        close(found.double(), want, rtol=1e-5, atol=1e-6)


def test_padding_on_either_side_does_not_count() -> None:
    # In float64: products of other lengths round differently.
    model = llama().double()
    ids = torch.randint(3, 32, (1, 7), generator=torch.Generator().manual_seed(0))
    none, real = torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 7, dtype=torch.long)
    alone = {"input_ids": ids, "attention_mask": real}
    left = {name: torch.cat([none, given], 1) for name, given in alone.items()}
    left["position_ids"] = (left["attention_mask"].cumsum(1) - 1).clamp_min(0)
    right = {name: torch.cat([given, none], 1) for name, given in alone.items()}
    places = {"left": 9, "right": 6}
    for metric in (metrics.loss(), metrics.kl()):
        want = interpret.ablate(model, alone, metric)
        for text in (left, right):
            found = interpret.ablate(model, text, metric)
            close([row.changed for row in found], [row.changed for row in want])
    for text, at in ((left, places["left"]), (right, places["right"])):
        metric, same = (lambda output, at=at: output.logits[:, at, 5] for at in (at, 6))
        found = interpret.ablate(model, text, metric, by="mean")
        want = interpret.ablate(model, alone, same, by="mean")
        close([row.changed for row in found], [row.changed for row in want])


def test_the_loss_of_an_encoder_and_decoder_is_that_of_what_is_written() -> None:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    source, target = torch.randint(3, 32, (2, 2, 6))
    text = {"input_ids": source, "decoder_input_ids": target}
    text["attention_mask"] = torch.tensor([[1, 1, 1, 0, 0, 0]]).expand(2, -1)
    with torch.no_grad():
        output = model(**text)
    want = nn.functional.cross_entropy(
        output.logits[:, :-1].mT, target[:, 1:], reduction="none"
    ).mean(-1)
    outcome = metrics.Outcome(output, text, output)
    close(metrics.loss().of(outcome), want)
    outcome = metrics.Outcome(output.logits + output.logits.sin(), text, output)
    then, now = output.logits.log_softmax(-1), outcome.output.log_softmax(-1)
    close(metrics.kl().of(outcome), (then.exp() * (then - now)).sum(-1).mean(-1))
    told = {"input_ids": source, "labels": target}
    with pytest.raises(RegardError, match="decoder_input_ids"):
        metrics.loss().of(metrics.Outcome(output, told, output))


def test_padding_of_an_encoder_does_not_count_in_means() -> None:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2, init_std=0.5,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).double().eval()
    source, target = torch.randint(3, 32, (2, 1, 6))
    none = torch.zeros_like(source)
    alone = {"input_ids": source, "attention_mask": torch.ones_like(source)}
    alone |= {"decoder_input_ids": target, "decoder_attention_mask": torch.ones_like(target)}
    padded = {name: torch.cat([given, none], 1) for name, given in alone.items()}

    def at_five(output: Any) -> Tensor:
        return output.logits[:, 5, 7]  # type: ignore[no-any-return]

    want, found = (interpret.ablate(model, text, at_five, by="mean") for text in (alone, padded))
    close([row.changed for row in found], [row.changed for row in want])


@pytest.mark.parametrize("token", [32, -1, torch.tensor([40]), 2.5, True, torch.tensor([1, 2])])
def test_a_token_that_the_model_does_not_know_is_refused(token: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    model, ids = llama(), torch.tensor([[5, 6, 7]])
    asked: list[Callable[[], Any]] = [
        lambda: interpret.ablate(model, ids, metrics.probability(token)),
        lambda: interpret.ablate(model, ids, metrics.log_odds(token)),
        lambda: interpret.ablate(model, ids, metrics.logit_difference(3, token)),
        lambda: interpret.direct_logits(model, ids, token),
        lambda: interpret.direct_logits(model, ids, 3, token),
    ]
    for ask in asked:
        with pytest.raises(RegardError, match=r"(?s)token.*0 to 31"):
            ask()


def test_a_text_without_a_next_token_has_no_loss() -> None:
    with pytest.raises(RegardError, match="no next token"):
        interpret.ablate(llama(), torch.tensor([[5]]), metrics.loss())
    with pytest.raises(RegardError, match="no next token"):
        interpret.ablate(llama(), torch.tensor([[5, 6, 7]]), metrics.loss(start=3))


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # Wrong types reach regard's own checks even when the shape-checking hook is on.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    model, x, _ = dense_model()
    mean = lambda output: output.mean((1, 2))  # noqa: E731
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: interpret.ablate(model, x, mean, by="noise"), '"zero", "mean" or "resample"'),
        (lambda: interpret.ablate(model, x[:1], mean, by="resample"), "give more texts"),
        (lambda: interpret.ablate(model, x, mean, heads=[(0, 4)]), "(layer 0, head 4)"),
        (lambda: interpret.ablate(model, x, mean, layers="none.*"), "layers.0, layers.1"),
        (lambda: interpret.ablate(model, x, mean, batch=0), "batch="),
        (lambda: interpret.ablate(model, ["text"], mean), "tokenize them"),
        (lambda: interpret.ablate(model, x, [mean, mean]), "2 metrics for 1 texts"),
        (lambda: interpret.ablate(model, x, lambda output: output), "a tensor [2, 7, 32]"),
        (lambda: interpret.ablate(model, x, metrics.loss()), "needs its tokens"),
        (lambda: interpret.ablate(model, x, lambda output: "high"), "got:      'high' (str)"),
        (lambda: interpret.ablate(model, x, lambda output: None), "got:      None"),
        (lambda: interpret.ablate(model, x, metrics.kl), "gives a number"),
        (lambda: interpret.ablate(copy.deepcopy(model).train(), x, mean), "model.eval()"),
        (lambda: interpret.ablate(mean, x, mean), "torch.nn.Module"),
        (lambda: interpret.knock_out(model, x, mean, [3]), "(query, key)"),
        (lambda: interpret.knock_out(model, x, mean, []), "no edge"),
        (lambda: interpret.knock_out(model, x, mean, (9, 0)), "out of range"),
        (lambda: interpret.knock_out(model, x, mean, (1, 0), softmax="in"), "renormalises"),
        (lambda: interpret.knock_out(model, x, mean, (1, 0), each="row"), '"layer", "head"'),
        (lambda: interpret.patch(model, x, x[:, 1:], mean), "same number of tokens"),
        (lambda: interpret.patch(model, x, [x, x], mean), "1 texts, 2 sources"),
        (lambda: interpret.patch(model, x, x, mean, what="weights"), "'patterns'"),
        (lambda: interpret.patch(model, x, x, mean, what="patterns", places=1), "whole"),
    ]
    for call, said in cases:
        with pytest.raises(RegardError) as error:
            call()
        assert said in str(error.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tuple_of_tensors_could_mean_two_things() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 16, batch_first=True).eval()
    source, target = torch.randn(2, 2, 5, 16)
    metric = lambda output: output[:, -1, 0]  # noqa: E731
    with pytest.raises(RegardError, match=r"(?s)two things.*\[\(a, b\)\].*list\(texts\)"):
        interpret.ablate(model, (source, target), metric)
    assert interpret.ablate(model, [(source, target)], metric).texts == 2
    assert len(interpret.attribute(model, (source, target), metric, layers="*encoder*").tokens) == 2


def test_nested_tensors_are_refused() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1)
    padded = torch.tensor([[False, False, True], [False, False, False]])

    def call() -> None:
        silent = Replaced({"layers.0.self_attn": [0]})
        with torch.no_grad(), interpret.intervene(encoder.eval(), silent):
            encoder(torch.randn(2, 3, 16), src_key_padding_mask=padded)

    with pytest.raises(RegardError, match="enable_nested_tensor=False"):
        call()
    nothing_in(encoder)
    nothing_in_the_process()


@pytest.mark.compiled
def test_compiled_models_are_changed_too() -> None:
    model, x, _ = dense_model()
    want = run(model, x, Replaced(HEADS))
    before = model(x)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        close(compiled(x), before.detach())
        with interpret.intervene(model, Replaced(HEADS)):
            close(compiled(x), want)
        close(compiled(x), before.detach())


def test_dropout_is_refused() -> None:
    class Drops(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    with pytest.raises(RegardError, match=r"dropout_p=0.5"):
        run(Drops(), torch.randn(1, 2, 3, 4), Replaced({"": [0]}))
    dropping = llama()
    dropping.config.attention_dropout = 0.5
    for layer in dropping.model.layers:
        layer.self_attn.attention_dropout = 0.5
    silent = Replaced({"model.layers.0.self_attn": [0]})
    with pytest.raises(RegardError, match=r"model\.eval"):
        run(dropping.train(), torch.tensor([[3, 4, 5]]), silent)
