"""What methods say that tokens and heads did, against the same written out as n×n."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import networkx
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CodeGenConfig,
    CodeGenForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

import regard
from regard import RegardError, interpret, masks
from regard.interpret import metrics
from regard.interpret.attribution import Anatomy, HeadMatrices, circuits, pair_scores
from regard.interpret.attribution.flow import _Network, flow
from regard.interpret.attribution.model_anatomy import gain_of
from regard.interpret.attribution.rollout import rollout
from regard.models.causal import CausalConfig, CausalModel
from tests.interpret.constructed import Dense
from tests.watching.left_behind import nothing_in, nothing_in_the_process

close: Callable[..., None] = torch.testing.assert_close


@pytest.fixture(autouse=True)
def few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three rows or so: more than one of each."""
    monkeypatch.setattr(pair_scores, "AT_ONCE", 200)
    monkeypatch.setattr(circuits, "AT_ONCE", 100)


def dense() -> tuple[Dense, Tensor]:
    torch.manual_seed(0)
    return Dense().double().eval(), torch.randn(2, 7, 32, dtype=torch.float64)


def metric(output: Tensor) -> Tensor:
    return output[:, -1].tanh().sum(-1) + output[:, 3, 0].square()


def of_dense(model: Dense) -> Any:
    return lambda path, _: model.o[int(path[-1])]


def test_weights_and_norms() -> None:
    model, x = dense()
    found = interpret.attribute(model, x, method="norms", output=of_dense(model), queries=[2, -1])
    every = interpret.attribute(model, x, method="norms", output=of_dense(model))
    assert found.weights is not None
    tokens = torch.zeros(2, 7, dtype=torch.float64)
    for i, had in enumerate(model.dense(x)[1]):
        W = model.o[i].weight.T.unflatten(0, (4, 8))
        written = torch.einsum("bhqk,bhke,hed->bhqkd", had["p"], had["v"], W)
        place = f"layers.{i}", 0
        close(every.heads[place], written.norm(dim=-1).sum(2).detach())
        close(found.rows[place], written.norm(dim=-1)[:, :, [2, 6]].detach())
        close(found.weights.rows[place], had["p"][:, :, [2, 6]].detach())
        tokens += written.sum(1).norm(dim=-1).sum(1).detach()
    close(every.tokens, tokens)
    assert every.weights is not None
    close(every.weights.tokens.sum(), torch.tensor(2.0 * 3 * 4 * 7, dtype=torch.float64))


def dense_gradients(model: Dense, x: Tensor, scale: float, patterns: Any = None) -> list[Tensor]:
    """p_ij · ∂m/∂p_ij with n×n leaves; of patterns that are scaled, if given."""
    ones = [torch.ones(2, 4, 7, 7, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def after(i: int, _: Tensor, p: Tensor, v: Tensor) -> Tensor:
        p = p if patterns is None else patterns[i]["p"].detach()
        return (scale * ones[i] * p) @ v

    value = metric(model.dense(x, after=after)[0]).sum()
    return [g / scale for g in torch.autograd.grad(value, ones)]


def test_gradients() -> None:
    model, x = dense()
    model.requires_grad_(False)
    want = dense_gradients(model, x, 1.0)
    found = interpret.attribute(model, x, metric, queries=[5, -1])
    every = interpret.attribute(model, x, metric)
    strong = interpret.attribute(model, x, metric, positive=True)
    for i in range(3):
        close(found.rows[f"layers.{i}", 0], want[i][:, :, [5, 6]])
        close(every.heads[f"layers.{i}", 0], want[i].sum(2))
        close(strong.heads[f"layers.{i}", 0], want[i].clamp_min(0).sum(2))
    close(every.tokens, sum(w.sum((1, 2)) for w in want))
    close(every.value, metric(model(x)))
    nothing_in(model)
    nothing_in_the_process()


def test_half_precision() -> None:
    """A model in bfloat16 is asked in float32: as near to float64 as its own rounding lets it."""
    model, x = dense()
    half = Dense().bfloat16().eval()
    half.load_state_dict(model.state_dict())
    exact = interpret.attribute(model, x, metric)
    found = interpret.attribute(half, x.bfloat16(), metric)
    assert found.tokens.dtype == torch.float32
    close(found.tokens.double(), exact.tokens, atol=0.03, rtol=0.1)
    norms = interpret.attribute(half, x.bfloat16(), method="norms", output=of_dense(half))
    want = interpret.attribute(model, x, method="norms", output=of_dense(model))
    close(norms.tokens.double(), want.tokens, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("scaled", ["all", "layer"])
def test_integrated_gradients_add_up(scaled: str) -> None:
    model, x = dense()
    found = interpret.attribute(model, x, metric, method="integrated", scaled=scaled, steps=8)
    assert found.explained is not None
    assert found.gap is not None
    close(found.tokens.sum(-1), found.explained, atol=1e-6, rtol=0)
    assert float(found.explained.abs().max()) > 0.1
    rough = interpret.attribute(model, x, metric, method="integrated", scaled=scaled, steps=1)
    assert float(rough.gap.abs().max()) > 100 * float(found.gap.abs().max())
    if scaled == "layer":
        return
    # The midpoints of many steps, with n×n leaves.
    with torch.no_grad():
        clean, had = model.dense(x)
        nothing = model.dense(x, after=lambda i, out, p, v: 0 * out)[0]
    close(found.explained, metric(clean) - metric(nothing))
    steps = [dense_gradients(model, x, (s + 0.5) / 40, had) for s in range(40)]
    for i in range(3):
        want = torch.stack([step[i] for step in steps]).mean(0).sum(2)
        close(found.heads[f"layers.{i}", 0], want, atol=1e-4, rtol=0)


class Sunk(nn.Module):
    """Attention with a sink and a window, and its weights as n×n."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.sink = nn.Parameter(torch.tensor([1.0, -0.5]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mask = masks.causal() & masks.window(2)
        out = regard.attention(q, k, v, mask=mask, sink=self.sink)
        return x + out.transpose(1, 2).flatten(2)

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        n = x.shape[1]
        near = torch.ones(n, n, dtype=torch.bool).tril() & ~torch.ones(n, n).bool().tril(-3)
        s = (q @ k.mT / 2).masked_fill(~near, -torch.inf).exp()
        return s / (s.sum(-1, keepdim=True) + self.sink.exp()[:, None, None]), v


def test_sinks_and_masks() -> None:
    torch.manual_seed(0)
    model, x = Sunk().double().eval(), torch.randn(1, 9, 8, dtype=torch.float64)
    p, v = model.weights(x)
    ones = torch.ones_like(p, requires_grad=True)
    out = (p * ones) @ v
    (want,) = torch.autograd.grad((x + out.transpose(1, 2).flatten(2)).square().sum(), ones)
    found = interpret.attribute(model, x, lambda output: output.square().sum((1, 2)))
    close(found.heads["", 0], want.sum(2))
    # A row of the rollout adds up to 1 also where a sink takes a share.
    mixing = p.mean(1) + torch.eye(9)
    mixing = mixing / mixing.sum(-1, keepdim=True)
    rolled = interpret.attribute(model, x, method="rollout", queries=range(9))
    close(rolled.rows["", 0][:, 0], mixing.detach())
    close(rolled.tokens.sum(-1), torch.ones(1, dtype=torch.float64))


def mixings(model: Dense, x: Tensor) -> Tensor:
    every = torch.stack([had["p"].mean(1) for had in model.dense(x)[1]]).detach()
    return (every + torch.eye(7)) / 2


def test_rollout() -> None:
    model, x = dense()
    first, second, third = mixings(model, x)
    want = third @ second @ first
    close(interpret.attribute(model, x, method="rollout").tokens, want[:, -1])
    found = interpret.attribute(model, x, method="rollout", queries=[1, 4])
    close(found.rows["", 0][:, 0], want[:, [1, 4]])
    close(found.rows["", 0].sum(-1), torch.ones(2, 1, 2, dtype=torch.float64))
    some = interpret.attribute(model, x, method="rollout", layers=["layers.0", "layers.2"])
    close(some.tokens, (third @ first)[:, -1])


def test_flow() -> None:
    model, x = dense()
    layers = mixings(model, x)[:, 1]
    graph = networkx.DiGraph()
    for above, matrix in enumerate(layers.flip(0).tolist()):
        for i, row in enumerate(matrix):
            for j, capacity in enumerate(row):
                if capacity > 0:
                    graph.add_edge((above, i), (above + 1, j), capacity=capacity)
    found = interpret.attribute(model, x, method="flow", queries=[-1, 3])
    for r, query in enumerate((6, 3)):
        for key in range(7):
            ends = (0, query), (3, key)
            want = networkx.maximum_flow_value(graph, *ends) if ends[1] in graph else 0.0
            close(float(found.rows["", 0][1, 0, r, key]), float(want))


def test_the_largest_flow_of_sparse_networks() -> None:
    """Where the first paths are in the way of others, and have to be taken back."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        kept = torch.rand(4, 5, 5, generator=draw) < 0.4
        layers = (torch.randint(1, 5, (4, 5, 5), generator=draw) * kept).double()
        graph = networkx.DiGraph()
        for above, i, j in layers.nonzero().tolist():
            room = float(layers[above, i, j])
            graph.add_edge((above, i), (above + 1, j), capacity=room)
        if (0, 0) not in graph or (4, 0) not in graph:
            continue
        want = networkx.maximum_flow_value(graph, (0, 0), (4, 0))
        assert _Network(layers.tolist()).largest(0, 20) == want


def causal() -> CausalModel:
    torch.manual_seed(0)
    config = CausalConfig(vocabulary=40, d_model=16, layers=2, heads=4)
    model = CausalModel(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def tiny(family: str) -> nn.Module:
    torch.manual_seed(0)
    wide = {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    grouped = {"intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 4}
    match family:
        case "regard":
            return causal()
        case "gpt2":
            named = {"n_positions": 16}
            model: Any = GPT2LMHeadModel(GPT2Config(**wide, **named))
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**wide, **grouped))
        case "neox":
            model = GPTNeoXForCausalLM(GPTNeoXConfig(**wide, intermediate_size=16))
        case "opt":
            model = OPTForCausalLM(OPTConfig(**wide, ffn_dim=16, word_embed_proj_dim=16))
        case "falcon":
            model = FalconForCausalLM(FalconConfig(**wide))
        case "codegen":
            named = {"n_positions": 16, "rotary_dim": 2}
            model = CodeGenForCausalLM(CodeGenConfig(**wide, **named))
        case "nemotron":
            model = NemotronForCausalLM(NemotronConfig(**wide, **grouped))
        case "gemma2":
            model = Gemma2ForCausalLM(Gemma2Config(**wide, **grouped))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


FAMILIES = ["regard", "gpt2", "llama", "neox"]
IDS = torch.randint(1, 40, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", [*FAMILIES, "opt", "falcon", "codegen", "nemotron"])
def test_direct_logits_add_up(family: str) -> None:
    model = tiny(family)
    found = interpret.direct_logits(model, IDS, 3, torch.tensor([5, 6]))
    with torch.no_grad():
        logits = metrics.logits_of(model(IDS))[:, -1].double()
    close(found.logit, logits[:, 3] - logits[[0, 1], [5, 6]], atol=1e-5, rtol=0)
    total = torch.stack([part.values for part in found.parts]).sum(0)
    close(total, found.logit, atol=1e-5, rtol=0)
    assert len(found.heads().parts) == 8
    assert not [hooks for m in model.modules() for hooks in m._forward_hooks.values()]


def test_a_head_writes_what_it_read() -> None:
    """The heads of a grouped layer, from the n×n weights that transformers gives."""
    model: Any = tiny("llama")
    found = interpret.direct_logits(model, IDS, 3, at=4).heads()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        seen = model(IDS, output_attentions=True, output_hidden_states=True)
        layer, stream = model.model.layers[0], seen.hidden_states[0]
        v = layer.self_attn.v_proj(layer.input_layernorm(stream)).unflatten(-1, (2, 4))
        read = seen.attentions[0] @ v.transpose(1, 2).repeat_interleave(2, 1)
        W = layer.self_attn.o_proj.weight.T.unflatten(0, (4, 4))
        written = torch.einsum("bhe,hed->bhd", read[:, :, 4], W)
        kept: list[Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, x: kept.append(x[0][:, 4]))
        model(IDS)
        hook.remove()
        scale = (kept[0].square().mean(-1) + model.model.norm.variance_epsilon).rsqrt()
        towards = model.lm_head.weight[3] * model.model.norm.weight
    want = torch.einsum("bhd,d,b->hb", written, towards, scale)
    close(torch.stack([part.values for part in found.parts[:4]]), want.double(), atol=1e-5, rtol=0)


def test_what_is_not_a_sum_is_refused() -> None:
    with pytest.raises(RegardError, match=r"does not add up[\s\S]*Gemma2ForCausalLM"):
        interpret.direct_logits(tiny("gemma2"), IDS)
    capped: Any = tiny("llama")
    capped.lm_head.register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.raises(RegardError, match="does not give the model's logits"):
        interpret.direct_logits(capped, IDS)


@pytest.mark.parametrize("family", [*FAMILIES, "codegen", "nemotron"])
def test_circuits(family: str) -> None:
    """Against the matrices of all pairs of tokens."""
    model: Any = tiny(family)
    body = interpret.anatomy(model)
    h, some = 3, torch.arange(5, 30)
    weights = interpret.attribution.head_matrices(model, body.attentions[1])
    q, k, v, o = (t[0] for t in weights.head(h))
    E, U = body.embedding[some].double(), body.unembedding[some].double()
    qk, ov = E @ q @ k.T @ E.T / 2, E @ v @ o @ U.T
    found = interpret.circuit(model, 1, h, tokens=some, norms=False, top=4)
    for pairs, matrix in ((found.looks, qk), (found.writes, ov)):
        scores, where = matrix.flatten().topk(4)
        close(torch.tensor([p.score for p in pairs]), scores.float())
        want = torch.stack([where // 25, where % 25], 1) + 5
        assert [list(p[:2]) for p in pairs] == want.tolist()
    eigen = torch.linalg.eigvals(ov)
    close(found.copying, float(eigen.real.sum() / eigen.abs().sum()), atol=1e-6, rtol=0)
    # The matrices are those that the layer uses: the first layer's values are of them.
    first = interpret.attribution.head_matrices(model, body.attentions[0])
    norm = model.get_submodule(f"{body.blocks[0]}.{body.attention_norm}")
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        kept: list[Tensor] = []
        hook = norm.register_forward_hook(lambda _, __, out: kept.append(out))
        model(IDS)
        hook.remove()
    x = seen[body.attentions[0]].trace.inputs
    close(x.v.mT.diff(), (kept[0][:, None] @ first.v).mT.diff())
    if family == "gpt2":
        close(x.q.mT.diff(), (kept[0][:, None] @ first.q).mT.diff())
        close(x.k.mT.diff(), (kept[0][:, None] @ first.k).mT.diff())
    # With norms: through the one before the layer, and the gain of the last.
    through = interpret.circuit(model, 0, h, tokens=some, top=1)
    read = norm(body.embedding[some]).detach().double()
    q, k, v, o = (t[0] for t in first.head(h))
    close(through.looks[0].score, float((read @ q @ k.T @ read.T / 2).max()), rtol=1e-5, atol=1e-5)
    last = model.get_submodule(body.norm)
    written = torch.randn(1, 16) - 0.5
    with torch.no_grad():
        given = (last(written) - last(-written)) @ body.unembedding[some].T / 2
    said = circuits._unembedding(model, body, norms=True)[some]
    centred = written - written.mean() if isinstance(last, nn.LayerNorm) else written
    scale = centred.square().mean().sqrt()
    close(written.double() @ said.T / scale, given.double(), rtol=1e-4, atol=1e-4)


class Centred(nn.Module):
    """A norm whose name says nothing: gain, and 1 is added to it; with or without the mean."""

    def __init__(self, wide: int, *, centres: bool) -> None:
        super().__init__()
        self.centres, self.weight = centres, nn.Parameter(torch.randn(wide))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centres else x
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + self.weight)


@pytest.mark.parametrize("centres", [False, True])
@pytest.mark.parametrize("wide", [7, 16])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_a_norm_does_is_seen_in_what_it_gives(
    centres: bool, wide: int, kind: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm = Centred(wide, centres=centres).to(kind)
    gain, bias, found = gain_of(norm, torch.zeros(1, wide, dtype=kind))
    assert found == centres
    assert not bias.any()
    close(gain, 1 + norm.weight.detach().double())


def test_tokens_narrower_than_the_stream_are_refused() -> None:
    config = OPTConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, ffn_dim=16,
        word_embed_proj_dim=8,
    )  # fmt: skip
    model = OPTForCausalLM(config).eval()
    with pytest.raises(RegardError, match=r"8 numbers[\s\S]*16"):
        interpret.direct_logits(model, IDS)
    with pytest.raises(RegardError, match=r"8 numbers[\s\S]*16"):
        interpret.circuit(model, 0, 0)


def test_blocks_that_drop_at_random_are_refused() -> None:
    with pytest.raises(RegardError, match="training mode"):
        interpret.circuit(tiny("gpt2").train(), 1, 0, after=1)


def test_a_head_that_copies_has_copying_score_1() -> None:
    """Embeddings are unit vectors; a head reads and writes the token itself, or its opposite."""
    one = torch.eye(6)
    body = Anatomy(("a.0",), ("a.0",), one, one)
    copies, forbids, shifts = (
        HeadMatrices(one[None], one[None], one[None], o[None])
        for o in (2 * one, -one, one.roll(1, 0))
    )
    model = nn.Module()
    found = [
        interpret.circuit(model, 0, 0, anatomy=body, matrices=m) for m in (copies, forbids, shifts)
    ]
    close([c.copying for c in found], [1.0, -1.0, 0.0], atol=1e-6, rtol=0)
    assert {tuple(pair[:2]) for pair in found[0].writes[:6]} == {(i, i) for i in range(6)}


def test_tokens_read_by_the_first_block() -> None:
    model = causal()
    some = torch.arange(5, 30)
    with torch.no_grad():
        stream = model.blocks[0](model.embedding(some[:, None]), mask=masks.causal())[:, 0]
        read = model.blocks[1].attention_norm(stream).double()
    m = interpret.attribution.head_matrices(model, "blocks.1.attention").head(2)
    want = (read @ m.q[0] @ m.k[0].T @ read.T / 2).max()
    found = interpret.circuit(model, 1, 2, tokens=some, after=1, top=1)
    close(found.looks[0].score, float(want))


@pytest.mark.parametrize("family", ["regard", "llama"])
def test_compositions(family: str) -> None:
    model: Any = tiny(family)
    found = interpret.compositions(model)
    paths = interpret.anatomy(model).attentions
    early, late = (interpret.attribution.head_matrices(model, path) for path in paths)
    for h in range(4):
        for i in range(4):
            _, _, v, o = (t[0] for t in early.head(h))
            q, k, v2, o2 = (t[0] for t in late.head(i))
            for kind, M in (("Q", q @ k.T), ("K", k @ q.T), ("V", v2 @ o2)):
                W = v @ o
                want = (W @ M).norm() / (W.norm() * M.norm())
                close(found.scores[kind][0, h, 1, i], want)
    assert found.scores["Q"][1].isnan().all()
    best = found.records()[0]
    assert best["score"] == max(float(s.nan_to_num().max()) for s in found.scores.values())
    assert "mean of all pairs" in repr(found)


def test_tables() -> None:
    model, x = dense()
    words = [f"w{i}" for i in range(6)] + ["<b>\x1b"]
    found = interpret.attribute(model, x, metric, method="integrated", words=words, steps=2)
    assert "explains" in repr(found)
    assert "\x1b" not in repr(found)
    assert "&lt;b&gt;" in found._repr_html_()
    assert found.records()[9] == {
        "sequence": 1, "token": 2, "method": "integrated", "score": float(found.tokens[1, 2]),
        "word": "w2",
    }  # fmt: skip
    norms = interpret.attribute(model, x[:1], method="norms", output=of_dense(model))
    assert repr(norms).splitlines()[0].split() == ["token", "norms", "weights", "strongest", "head"]
    assert norms.records()[0]["weight"] == float(norms.weights.tokens[0, 0])
    close(norms.by_head()["layers.1", 0], norms.heads["layers.1", 0].sum(-1))
    parts = interpret.direct_logits(causal(), IDS)
    assert "the parts miss" in repr(parts)
    assert len(parts.records()) == len(parts.parts)
    assert "<table>" in parts._repr_html_()
    seen = interpret.circuit(causal(), 0, 1, words=[str(i) for i in range(40)], top=3)
    assert "copying score" in repr(seen)
    few = interpret.circuit(causal(), 0, 1, tokens=torch.tensor([0, 39]), words=["zero"], top=4)
    assert "'zero' → 39" in repr(few)
    assert len(seen.records()) == 6


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    model, x = dense()
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: interpret.attribute(model, x, method="magic"), "'weights', 'norms'"),
        (lambda: interpret.attribute(model, x), "no metric"),
        (lambda: interpret.attribute(model, x, metric, method="rollout"), "knows of no metric"),
        (lambda: interpret.attribute(model, x, method="norms"), "output=lambda"),
        (lambda: interpret.attribute(model, x, lambda o: o.detach().sum()), "detach()"),
        (lambda: interpret.attribute(model, x, lambda o: o), "a tensor [2, 7, 32]"),
        (lambda: interpret.attribute(model, x, metric, steps=0), "steps="),
        (lambda: interpret.attribute(model, x, metric, scaled="half"), '"all" or "layer"'),
        (lambda: interpret.attribute(model, x, method="weights", positive=True), "no sign"),
        (lambda: interpret.attribute(model, x, metric, words=["a"]), "1 words for 7 tokens"),
        (lambda: interpret.attribute(model, x, metric, queries=9), "out of range"),
        (lambda: interpret.attribute(model, x, metric, queries=[]), "no query was chosen"),
        (lambda: interpret.attribute(model.train(), x, metric), "model.eval()"),
        (lambda: interpret.anatomy(nn.Linear(2, 2)), "not a stack of blocks"),
        (lambda: interpret.circuit(causal(), 7, 0), "0 to 1"),
        (lambda: interpret.circuit(causal(), 1, 7), "0 to 3"),
        (lambda: interpret.circuit(causal(), 1, 0, after=7), "0 to 2"),
        *(
            (partial(interpret.circuit, causal(), 1, 0, tokens=tokens), got)
            for tokens, got in {
                (38, 40): "got:      40",
                (-1, 3): "got:      -1",
                ((1, 2), (3, 4)): "int64 [2, 2]",
                (True,) * 40: "torch.bool [40]",
                (1.5, 2.0): "float32 [2]",
                (): "[0]",
                "a token": "'a token'",
            }.items()
        ),
    ]
    for call, said in cases:
        with pytest.raises(RegardError) as error:
            call()
        assert said in str(error.value)


def test_what_cannot_be_multiplied_is_refused() -> None:
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4)
    with pytest.raises(RegardError, match="3 queries over 5 keys"):
        rollout([regard.trace(q, k, k)], torch.tensor([0]))
    long = torch.randn(1, 1, 300, 4)
    with pytest.raises(RegardError, match="takes long"):
        flow([regard.trace(long, long, long)], torch.tensor([0]))


def padded(side: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A text of six tokens, and the same in a batch with one of nine."""
    ids = torch.randint(3, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    real = torch.ones(2, 9, dtype=torch.long)
    mine = slice(3, 9) if side == "left" else slice(0, 6)
    real[0] = 0
    real[0, mine] = 1
    places = (real.cumsum(1) - 1).clamp_min(0)
    both = {"input_ids": ids, "attention_mask": real, "position_ids": places}
    return {name: t[:1, mine] for name, t in both.items()}, both


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", ["weights", "norms", "rollout", "flow"])
def test_rows_of_padding_do_not_count(side: str, method: Any) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    alone, both = padded(side)
    want, found = (interpret.attribute(model, text, method=method) for text in (alone, both))
    real = both["attention_mask"][0].bool()
    close(found.tokens[0, real], want.tokens[0])
    longer = interpret.attribute(model, both["input_ids"][1:], method=method)
    close(found.tokens[1], longer.tokens[0])
    for place, scores in want.heads.items():
        close(found.heads[place][0][:, real], scores[0])
    # Who names rows gets those.
    named = interpret.attribute(model, both, method=method, queries=range(9))
    assert named.rows[next(iter(named.rows))].shape[2] == 9
