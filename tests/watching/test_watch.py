"""Watching models that call PyTorch's attention or regard's: what is seen, and that nothing else
changes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import regard
from regard import RegardError, masks
from regard.calls import watchers
from regard.seen import Seen, statistics


class Plain(nn.Module):
    """Attention as many write it: projections and one call."""

    def __init__(self, heads: int = 2, **how: Any) -> None:
        super().__init__()
        self.qkv, self.heads, self.how = nn.Linear(16, 48), heads, how

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, **self.how)
        return out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two layers; the second under gradient checkpointing if asked."""

    def __init__(self, *layers: nn.Module, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(layers), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = x(2, 7, 16)


def model(**how: Any) -> Model:
    torch.manual_seed(1)
    return Model(Plain(**how), Plain(**how)).eval()


def eager_weights(layer: Plain, given: Tensor, hidden: Tensor | None = None) -> Tensor:
    q, k, _ = layer.qkv(given).unflatten(-1, (3, layer.heads, -1)).permute(2, 0, 3, 1, 4)
    s = q @ k.mT / q.shape[-1] ** 0.5
    return (s if hidden is None else s.masked_fill(hidden, -torch.inf)).softmax(-1)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_weights_are_those_of_the_formula(causal: bool, grad: bool) -> None:
    m = model(is_causal=causal)
    with torch.set_grad_enabled(grad):
        before = m(X)
        with regard.watch(m, keep="traces") as seen:
            y = m(X)
    torch.testing.assert_close(y, before)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    want = eager_weights(m.layers[0], X, hidden)
    torch.testing.assert_close(seen["layers.0"].trace.weights(), want)
    assert list(seen) == ["layers.0", "layers.1"]
    assert seen["layers.0"].trace.out.grad_fn is None


@pytest.mark.parametrize("kind", ["keep", "bias", "per head", "three axes"])
def test_masks_keep_pytorchs_meaning(kind: str) -> None:
    allowed = x(2, 2, 7, 7, seed=3) > -0.5
    allowed[..., 0] = True
    given = {
        "keep": allowed[:1, :1],
        "bias": x(7, 7),
        "per head": allowed[:1],
        "three axes": allowed[0, :1],
    }[kind]
    m = Model(Plain(attn_mask=given)).eval()
    with torch.no_grad():
        want = m(X)
        with regard.watch(m, keep="traces") as seen:
            torch.testing.assert_close(m(X), want)
    weights = seen["layers.0"].trace.weights()
    if kind == "bias":
        return
    shown = given if given.ndim == 4 else given[None]
    assert (weights[~shown.expand_as(weights)] == 0).all()


def test_scale_grouped_heads_and_other_shapes() -> None:
    q, k = x(2, 4, 5, 8), x(2, 2, 6, 8, seed=1)

    class Grouped(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, scale=0.5, enable_gqa=True)

    class Bare(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(t, t, t)

    m = Grouped()
    with regard.watch(m, keep="traces") as seen:
        torch.testing.assert_close(m(q, k), F.scaled_dot_product_attention(
            q, k, k, scale=0.5, enable_gqa=True
        ))  # fmt: skip
    assert seen[""].trace.inputs.shape[:] == (2, 4, 5, 6)
    for shape in ((5, 8), (3, 5, 8), (2, 3, 2, 5, 8)):
        t, bare = x(*shape), Bare()
        with regard.watch(bare):
            got = bare(t)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(t, t, t))


def test_pytorchs_causal_starts_at_the_first_key() -> None:
    class Causal(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    q, k, m = x(1, 2, 3, 8), x(1, 2, 5, 8, seed=1), Causal()
    with regard.watch(m, keep="traces") as seen:
        got = m(q, k)
    torch.testing.assert_close(got, m(q, k))
    assert seen[""].trace.weights(queries=[0])[..., 0].eq(1).all()


def test_statistics_are_those_of_the_traces() -> None:
    m = model(is_causal=True)
    with torch.no_grad(), regard.watch(m, keep="traces") as seen:
        m(X)
        m(x(3, 4, 16))
    layer = seen["layers.1"]
    assert layer.calls == len(layer.traces) == 2
    entropy = torch.cat([t.entropy.transpose(1, 2).flatten(0, 1) for t in layer.traces])
    torch.testing.assert_close(layer.entropy, entropy.mean(0))
    largest = torch.stack([t.max_logit.amax((0, 2)) for t in layer.traces])
    assert torch.equal(layer.max_logit, largest.amax(0))
    first = torch.cat([t.mass(0).transpose(1, 2).flatten(0, 1) for t in layer.traces])
    torch.testing.assert_close(layer.first, first.mean(0))
    with pytest.raises(RegardError, match="2 traces of 2 calls"):
        _ = layer.trace


def test_what_was_seen_can_be_asked_while_the_model_runs() -> None:
    m, said = model(), []
    with torch.no_grad(), regard.watch(m) as seen:
        m.layers[1].register_forward_pre_hook(lambda *_: said.append(repr(seen)))
        m(X)
        inside = seen["layers.0"].entropy
        m(X)
    assert "layers.0" in said[0]
    assert "layers.1" not in said[0]
    torch.testing.assert_close(seen["layers.0"].entropy, inside)
    assert "layers.0      2" in said[1]
    assert "layers.1      1" in said[1]


def test_long_calls_are_added_up_before_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    with torch.no_grad(), regard.watch(m) as seen:
        m(X)
    monkeypatch.setattr(statistics, "MANY", 1)
    ended: list[object] = []
    with torch.no_grad(), regard.watch(m) as at_once:
        m.layers[1].register_forward_pre_hook(
            lambda *_: ended.append(at_once["layers.0"].statistics)
        )
        m(X)
    assert ended != [None]
    for path, layer in seen.items():
        for mine, other in zip(
            vars(layer.statistics).values(), vars(at_once[path].statistics).values(), strict=True
        ):
            assert torch.equal(mine, other)


def test_empty_and_broken_rows_are_counted_apart() -> None:
    keep = torch.ones(7, 7, dtype=torch.bool)
    keep[2] = False
    m = Model(Plain(attn_mask=keep)).eval()
    bad = X.clone()
    bad[0, 5] = torch.nan
    with torch.no_grad(), regard.watch(m) as seen:
        m(bad)
    sums = seen["layers.0"].statistics
    assert sums is not None
    assert sums.rows.tolist() == [14, 14]
    assert sums.empty.tolist() == [2, 2]
    # Every row of the first sequence that sees the broken key is broken.
    assert sums.broken.tolist() == [6, 6]
    assert seen["layers.0"].entropy.isfinite().all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_pytorchs_encoder_and_decoder(train: bool, grad: bool) -> None:
    torch.manual_seed(0)
    m = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True).train(train)
    source, target = x(2, 6, 16), x(2, 5, 16, seed=1)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    how = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    with torch.set_grad_enabled(grad):
        want = m(source, target, **how)
        with regard.watch(m, keep="traces") as seen:
            got = m(source, target, **how)
    torch.testing.assert_close(got, want)
    names = ["encoder.layers.{}.self_attn", "decoder.layers.{}.self_attn",
             "decoder.layers.{}.multihead_attn"]  # fmt: skip
    assert sorted(seen) == sorted(name.format(i) for name in names for i in (0, 1))
    cross = seen["decoder.layers.1.multihead_attn"].trace.weights()
    assert cross.shape == (2, 2, 5, 6)
    assert (cross[1, :, :, 4:] == 0).all()


@pytest.mark.parametrize("average", [True, False])
def test_multihead_attention_that_returns_weights(average: bool) -> None:
    m = nn.MultiheadAttention(16, 2, batch_first=True)
    with regard.watch(m, keep="traces") as seen:
        _, weights = m(X, X, X, average_attn_weights=average)
    traced = seen[""].trace.weights()
    torch.testing.assert_close(traced.mean(1) if average else traced, weights)


def test_regards_own_modules() -> None:
    m = Model(regard.nn.MultiHeadAttention(16, 2), Plain())
    want = m(X)
    with regard.watch(m) as seen:
        torch.testing.assert_close(m(X), want)
    assert list(seen) == ["layers.0", "layers.1"]
    assert all(layer.calls == 1 for layer in seen.values())


def test_a_named_backend_stays_the_one_that_answers() -> None:
    class Named(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return regard.attention(t, t, t, mask=masks.causal(), backend="sdpa")

    t, m = x(1, 2, 5, 8), Named()
    with regard.watch(m) as seen:
        got = m(t)
    assert torch.equal(got, m(t))
    assert seen[""].calls == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients_and_counts_once(reentrant: bool) -> None:
    torch.manual_seed(1)
    m = Model(Plain(), regard.nn.MultiHeadAttention(16, 2), reentrant=reentrant)
    given = X.clone().requires_grad_()
    m(given).square().sum().backward()
    want = [p.grad.clone() for p in m.parameters()]
    m.zero_grad()
    with regard.watch(m) as seen:
        m(given).square().sum().backward()
    for p, grad in zip(m.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, grad)
    assert [layer.calls for layer in seen.values()] == [1, 1]


def test_dropout_draws_the_same_numbers() -> None:
    m = Model(Plain(dropout_p=0.5)).train()
    torch.manual_seed(3)
    want = m(X)
    torch.manual_seed(3)
    with regard.watch(m) as seen:
        assert torch.equal(m(X), want)
    assert seen["layers.0"].calls == 1


def test_some_layers_some_heads_some_runs() -> None:
    m = model()
    with torch.no_grad(), regard.watch(m, layers=["*.1"], heads=[1], every=2) as seen:
        for _ in range(3):
            m(X)
    assert list(seen) == ["layers.1"]
    assert seen["layers.1"].calls == 2
    assert seen["layers.1"].heads == 1
    with torch.no_grad(), regard.watch(m, keep="traces") as every:
        m(X)
    torch.testing.assert_close(seen["layers.1"].entropy[0], every["layers.1"].entropy[1])


@pytest.mark.parametrize("layers", ["*.1", ["*.1"], ("nothing", "layers.1"), {"*.1"}])
def test_one_pattern_or_several(layers: Any) -> None:
    m = model()
    with torch.no_grad(), regard.watch(m, layers=layers) as seen:
        m(X)
    assert list(seen) == ["layers.1"]


@pytest.mark.parametrize("heads", [1, [1], range(1, 2), torch.tensor([1]), torch.tensor(1)])
def test_one_head_or_several(heads: Any) -> None:
    m = model()
    with torch.no_grad(), regard.watch(m) as every, regard.watch(m, heads=heads) as seen:
        m(X)
    torch.testing.assert_close(seen["layers.1"].entropy, every["layers.1"].entropy[1:])


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"layers": [1]}, r"layers= names modules by their paths\n  got:      \[1\]"),
        ({"layers": 1}, "got:      1"),
        ({"layers": b"layers"}, "got:      b'layers'"),
        ({"heads": "01"}, r"heads= are numbers of heads\n  got:      '01'"),
        ({"heads": [0.5]}, r"got:      \[0\.5\]"),
        ({"heads": [True]}, r"got:      \[True\]"),
        ({"heads": 1.0}, r"got:      1\.0"),
    ],
)
def test_what_names_no_layers_or_heads_is_refused(
    wrong: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(RegardError, match=what):
        regard.watch(model(), **wrong)


def test_a_head_that_is_not_there() -> None:
    m = model()
    with pytest.raises(RegardError, match="heads: index out of range"), regard.watch(m, heads=2):
        m(X)


def test_attach_and_detach() -> None:
    m = model()
    watch = regard.watch(m)
    seen = watch.attach()
    with pytest.raises(RegardError, match="attached already"):
        watch.attach()
    m(X)
    watch.detach()
    m(X)
    assert seen["layers.0"].calls == 1
    seen.clear()
    assert repr(seen) == "Seen(nothing yet)"


def hooks(m: nn.Module) -> int:
    return sum(len(n._forward_hooks) + len(n._forward_pre_hooks) for n in m.modules())


def test_a_helper_of_somebodys_module_is_seen_there() -> None:
    """What attends need not say so: any module but PyTorch's own is asked for its path."""

    class Quiet(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            return helper(super().forward(given))

    def helper(t: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(t[:, None], t[:, None], t[:, None])[:, 0]

    m = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), Quiet(8, 8)))
    with regard.watch(m) as seen:
        m(x(2, 7, 8))
    assert list(seen) == ["1.1"]


def test_nothing_is_left_behind() -> None:
    m, function = model(), F.scaled_dot_product_attention

    def run_and_fail() -> None:
        with regard.watch(m):
            m(X)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_and_fail()
    with pytest.raises(RuntimeError), regard.watch(m):
        m(x(2, 7, 5))
    assert hooks(m) == 0
    assert watchers.watchers.get() == ()
    assert F.scaled_dot_product_attention is function
    assert torch.overrides._get_current_function_mode_stack() == []


def test_watching_inside_watching() -> None:
    m = model()
    with torch.no_grad(), regard.watch(m) as outer, regard.watch(m.layers[1]) as inner:
        m(X)
    assert list(outer) == ["layers.0", "layers.1"]
    assert [layer.calls for layer in outer.values()] == [1, 1]
    assert list(inner) == [""]


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_two_watches_of_one_multihead_attention(need_weights: bool, grad: bool) -> None:
    m = nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.set_grad_enabled(grad), regard.watch(m) as outer, regard.watch(m) as inner:
        m(X, X, X, need_weights=need_weights)
    assert (outer[""].calls, inner[""].calls) == (1, 1)


def test_two_watches_of_a_model_that_learns() -> None:
    m = model()
    with regard.watch(m) as outer, regard.watch(m) as inner:
        m(X)
    for seen in (outer, inner):
        assert [layer.calls for layer in seen.values()] == [1, 1]


def test_other_threads_are_not_seen() -> None:
    m, t = model(), x(1, 2, 5, 8)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.shared = m.layers[0], m.layers[1]

        def forward(self, given: Tensor) -> Tensor:
            def elsewhere() -> None:
                regard.attention(t, t, t)
                self.shared(given)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return self.own(given)

    both = Both()
    with regard.watch(both) as seen:
        both(X)
    assert list(seen) == ["own"]
    assert seen["own"].calls == 1


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # Wrong types reach regard's own checks even when the shape-checking hook is on.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(RegardError, match=r"a torch\.nn\.Module"):
        regard.watch("gpt2")  # type: ignore[arg-type]
    with pytest.raises(RegardError, match="what to keep"):
        regard.watch(model(), keep="all")  # type: ignore[arg-type]
    with pytest.raises(RegardError, match="1 or more"):
        regard.watch(model(), every=0)
    linear = nn.Linear(16, 16)
    with (
        pytest.raises(RegardError, match="the model ran, but no attention was seen"),
        regard.watch(linear),
    ):
        linear(X)
    watched = model()
    with (
        pytest.raises(
            RegardError, match=r"no layer that attended has such a path[\s\S]*accepted: '"
        ),
        regard.watch(watched, layers=["nowhere"]),
    ):
        watched(X)
    with pytest.raises(RegardError, match="none yet: run the model"):
        _ = Seen()["layers.0"]


def test_a_table() -> None:
    m = model()
    with torch.no_grad(), regard.watch(m) as seen:
        m(X)
    lines = repr(seen).splitlines()
    assert lines[0].split() == [
        "layer", "calls", "heads", "max", "logit", "entropy", "on", "first", "key", "empty",
        "broken",
    ]  # fmt: skip
    assert lines[1].startswith("layers.0      1      2")


@pytest.mark.compiled
@pytest.mark.parametrize("when", ["before", "inside"])
def test_compiled_models(when: str) -> None:
    m = model(is_causal=True)
    with torch.no_grad():
        want = m(X)
        compiled = torch.compile(m, backend="aot_eager")
        if when == "before":
            compiled(X)
        with regard.watch(compiled) as seen:
            torch.testing.assert_close(compiled(X), want)
            compiled(X)
        torch.testing.assert_close(compiled(X), want)
    assert [layer.calls for layer in seen.values()] == [2, 2]
    assert list(seen) == ["_orig_mod.layers.0", "_orig_mod.layers.1"]


@pytest.mark.compiled
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("when", ["before", "inside"])
def test_compiled_transformer_layers(when: str, grad: bool, train: bool) -> None:
    torch.manual_seed(0)
    m = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(train)
    compiled = torch.compile(m, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        want = m(X)
        if when == "before":
            compiled(X)
        with regard.watch(compiled, keep="traces") as seen:
            torch.testing.assert_close(compiled(X), want)
        torch.testing.assert_close(compiled(X), want)
    assert list(seen) == ["_orig_mod.self_attn"]
    with torch.no_grad():
        _, weights = m.self_attn(X, X, X, average_attn_weights=False)
    torch.testing.assert_close(seen["_orig_mod.self_attn"].trace.weights(), weights)
