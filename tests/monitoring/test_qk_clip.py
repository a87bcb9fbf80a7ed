"""QK-clip: the largest logit of every head that passed the threshold lands on it, and nothing else
changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard
from regard import RegardError
from regard.errors import RegardWarning
from regard.monitoring import Projections, QKClip
from regard.monitoring.qk_clip import Kind
from tests.watching.test_watch import x

WIDE = 32


class Written(nn.Module):
    """Attention as people write it, with projections of any name and layout."""

    def __init__(self, heads: int = 4, key_heads: int = 4, **parts: nn.Module) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = heads, key_heads, 8
        for name, part in parts.items():
            self.add_module(name, part)

    def qk(self, t: Tensor) -> tuple[Tensor, Tensor]:
        names = list(dict(self.named_children()))
        parts = [self.get_submodule(name)(t) for name in names]
        if len(parts) > 1:
            return parts[0], parts[1]
        q, k, _ = parts[0].split([n * self.width for n in (self.heads, *[self.key_heads] * 2)], -1)
        return q, k

    def forward(self, t: Tensor) -> Tensor:
        q, k = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in self.qk(t))
        return F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)


class Flipped(nn.Module):
    """The linear layer that GPT-2 has: its weight is [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(x(inputs, outputs)), nn.Parameter(x(outputs))

    def forward(self, t: Tensor) -> Tensor:
        return t @ self.weight + self.bias


Flipped.__name__ = "Conv1D"


class Interleaved(Written):
    """Query, key and value of one head after the other."""

    def qk(self, t: Tensor) -> tuple[Tensor, Tensor]:
        each = self.get_submodule("query_key_value")(t).unflatten(-1, (self.heads, 3, self.width))
        return each[..., 0, :].flatten(-2), each[..., 1, :].flatten(-2)


def linear(outputs: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDE, outputs, bias=bias)


def torch_multihead(**how: Any) -> nn.Module:
    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDE, 4, batch_first=True, **how)
            for p in self.parameters():
                nn.init.normal_(p)

        def forward(self, t: Tensor) -> Tensor:
            hidden = torch.ones(t.shape[1], t.shape[1], dtype=torch.bool).triu(1)
            out: Tensor = self.attention(t, t, t, attn_mask=hidden, need_weights=False)[0]
            return out

    return Self()


def huggingface(name: str, **how: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=32, hidden_size=WIDE, num_hidden_layers=2, num_attention_heads=4, **how
    )
    config._attn_implementation = "sdpa"
    inner = getattr(transformers, f"{name}Model")(config)

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, t: Tensor) -> Tensor:
            out: Tensor = self.inner(inputs_embeds=t).last_hidden_state
            return out

    return Read().train()


MADE: dict[str, Callable[[], nn.Module]] = {
    "regard": lambda: regard.nn.MultiHeadAttention(WIDE, 4, bias=True),
    "regard grouped": lambda: regard.nn.MultiHeadAttention(WIDE, 4, kv_heads=2),
    "regard multi-query rotary": lambda: regard.nn.MultiHeadAttention(
        WIDE, 4, kv_heads=1, rotary=regard.nn.Rotary()
    ),
    "torch": torch_multihead,
    "torch without bias": lambda: torch_multihead(bias=False),
    "torch apart": lambda: torch_multihead(kdim=WIDE, vdim=WIDE),
    "torch bias_k": lambda: torch_multihead(add_bias_kv=True),
    "q_proj": lambda: Written(q_proj=linear(32), k_proj=linear(32)),
    "query": lambda: Written(query=linear(32), key=linear(32)),
    "wq": lambda: Written(wq=linear(32, False), wk=linear(32, False)),
    "to_q grouped": lambda: Written(4, 2, to_q=linear(32), to_k=linear(16)),
    "qkv": lambda: Written(qkv=linear(96)),
    "qkv_proj grouped": lambda: Written(4, 2, qkv_proj=linear(64)),
    "c_attn linear": lambda: Written(c_attn=linear(96)),
    "c_attn flipped": lambda: Written(c_attn=Flipped(WIDE, 96)),
    "query_key_value": lambda: Interleaved(query_key_value=linear(96)),
    "Llama": lambda: huggingface("Llama", intermediate_size=32, num_key_value_heads=2),
    "GPT2": lambda: huggingface("GPT2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "GPTNeoX": lambda: huggingface("GPTNeoX", intermediate_size=32),
    "Phi3": lambda: huggingface(
        "Phi3", intermediate_size=32, num_key_value_heads=2, pad_token_id=0
    ),
    "Bert": lambda: huggingface(
        "Bert", intermediate_size=32, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0
    ),
}


def logits(m: nn.Module, given: Tensor) -> dict[str, Tensor]:
    with regard.watch(m) as seen:
        m(given)
    return {path: layer.max_logit for path, layer in seen.items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", MADE)
def test_the_largest_logit_lands_on_the_threshold(name: str) -> None:
    torch.manual_seed(0)
    m, given = MADE[name](), 3 * x(2, 9, WIDE)
    before = logits(m, given)
    first = next(iter(before))
    # Half of the first layer's heads pass the threshold. Later layers see other inputs afterwards.
    threshold = float(before[first].sort().values[1:3].mean())
    assert threshold > 0
    kept = {n: p.clone() for n, p in m.named_parameters()}
    clip = QKClip(threshold, layers=[first])
    with regard.Monitor(m, every=1, qk_clip=clip, rules=()) as monitor:
        m(given)
        report = monitor.step()
    after = logits(m, given)[first]
    torch.testing.assert_close(after, before[first].clamp_max(threshold), rtol=1e-4, atol=1e-5)
    assert report is not None
    assert report.layers[first].clipped == tuple((before[first] > threshold).double().tolist())
    changed = {n for n, p in m.named_parameters() if not torch.equal(p, kept[n])}
    assert changed
    assert all(n.startswith(first) for n in changed)
    parts = {part for n in changed for part in n.split(".")}
    assert not parts & {"v_proj", "value", "o_proj", "out_proj"}


def test_only_rows_of_clipped_heads_change() -> None:
    m = Written(qkv=linear(96))
    kept = m.qkv.weight.detach().clone()
    largest = torch.tensor([50.0, 5.0, 200.0, 5.0])
    acted = QKClip(10.0).clip("", m, _kind(m), largest)
    assert acted.tolist() == [1, 0, 1, 0]
    share = (m.qkv.weight.detach() / kept).view(3, 4, 8, WIDE)
    want = torch.tensor([5**-0.5, 1, 20**-0.5, 1])
    torch.testing.assert_close(share[:2], want.view(4, 1, 1).expand(2, 4, 8, WIDE))
    assert torch.equal(m.qkv.weight[64:], kept[64:])


def test_shared_key_heads_take_what_all_their_queries_need() -> None:
    m = regard.nn.MultiHeadAttention(WIDE, 4, kv_heads=2)
    q, k = m.q_proj.weight.detach().clone(), m.k_proj.weight.detach().clone()
    # In the first group one head is within the threshold, so its key must stay.
    QKClip(10.0).clip("", m, _kind(m), torch.tensor([40.0, 5.0, 40.0, 160.0]))
    keys = (m.k_proj.weight / k).detach().view(2, 8, WIDE)[:, 0, 0]
    queries = (m.q_proj.weight / q).detach().view(4, 8, WIDE)[:, 0, 0]
    torch.testing.assert_close(keys, torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(queries, torch.tensor([0.25, 1.0, 0.5, 0.125]))


def _kind(m: nn.Module) -> Any:
    from regard.monitoring.qk_clip import Kind

    with regard.watch(m, keep="traces") as seen:
        m(x(1, 3, WIDE))
    return Kind.of(next(iter(seen.values())).trace)


def test_broken_or_empty_heads_are_left_alone() -> None:
    m = Written(qkv=linear(96))
    kept = m.qkv.weight.detach().clone()
    odd = torch.tensor([math.nan, -math.inf, -50.0, 10.0])
    assert QKClip(10.0).clip("", m, _kind(m), odd).tolist() == [0, 0, 0, 0]
    assert torch.equal(m.qkv.weight, kept)


def test_projections_that_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Written):
        def qk(self, t: Tensor) -> tuple[Tensor, Tensor]:
            k, q = self.get_submodule("both")(t).chunk(2, -1)
            return q, k

    def find(path: str, module: nn.Module) -> Projections | None:
        weight, bias = module.both.weight, module.both.bias
        q, k = (([t.chunk(2)[i].unflatten(0, (4, 8)) for t in (weight, bias)]) for i in (1, 0))
        return Projections(q, k)

    m, given = Odd(both=linear(64)), 3 * x(2, 9, WIDE)
    before = logits(m, given)[""]
    clip = QKClip(float(before.min()), projections=find)
    with regard.Monitor(m, every=1, qk_clip=clip) as monitor:
        m(given)
        monitor.step()
    torch.testing.assert_close(logits(m, given)[""], before.min().expand(4), rtol=1e-4, atol=1e-4)
    wrong = QKClip(1.0, projections=lambda *_: Projections([m.both.weight], [m.both.weight]))
    with pytest.raises(RegardError, match=r"q with \[64\] rows"):
        wrong.clip("", m, _kind(m), before)
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    for nothing in (Projections([], []), ([], []), 3):
        empty: Any = QKClip(1.0, projections=lambda *_, nothing=nothing: nothing)
        with pytest.raises(RegardError, match=r"did not find the projections of a module"):
            empty.clip("", m, _kind(m), before)


class Biased(regard.nn.MultiHeadAttention):
    def forward(self, t: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(t, bias=regard.biases.alibi(torch.ones(4)))  # type: ignore[return-value]


class Capped(Written):
    def forward(self, t: Tensor) -> Tensor:
        q, k = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in self.qk(t))
        return regard.attention(q, k, k, softcap=5.0)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "unknown names": (
        lambda: Written(ask=linear(32), answer=linear(32)),
        "does not know where this module projects its queries and keys",
    ),
    "bias": (lambda: Biased(WIDE, 4), "a bias is part of its logits"),
    "softcap": (lambda: Capped(q_proj=linear(32), k_proj=linear(32)), "softcap=5 bounds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_clipped_is_refused_by_name(name: str) -> None:
    make, words = REFUSED[name]
    m = make()
    how: dict[str, Any] = {"every": 1, "qk_clip": 100.0, "rules": ()}
    with regard.Monitor(m, **how, on_error="raise") as monitor:
        m(x(1, 5, WIDE))
        with pytest.raises(RegardError, match=words) as refused:
            monitor.step()
    assert type(m).__name__ in str(refused.value)
    with regard.Monitor(m, **how) as monitor:
        m(x(1, 5, WIDE))
        with pytest.warns(RegardWarning, match=words) as told:
            report = monitor.step()
        m(x(1, 5, WIDE))
        monitor.step()
    assert len(told) == 1
    assert report is not None
    assert report.looks == 1


def test_norms_are_refused_before_anything_runs() -> None:
    m = regard.nn.MultiHeadAttention(WIDE, 4, qk_norm=True)
    with pytest.raises(RegardError, match="normalised after their projections") as told:
        regard.Monitor(m, qk_clip=100.0)
    assert "MultiHeadAttention at '' with q_norm, k_norm" in str(told.value)


@pytest.mark.parametrize("names", [("norm_q", "norm_k"), ("norm_query", "norm_key")])
def test_norms_are_known_by_either_order_of_their_names(names: tuple[str, str]) -> None:
    m = Written(to_q=linear(32), to_k=linear(32))
    for name in names:
        m.add_module(name, nn.RMSNorm(8))
    with pytest.raises(RegardError, match="Written at '' with " + ", ".join(names)):
        regard.Monitor(m, qk_clip=100.0)
    # One of what queries are made of leaves the logits proportional to their projection.
    read = Written(to_q=linear(32), to_k=linear(32))
    read.add_module(names[0], nn.RMSNorm(WIDE))
    regard.Monitor(read, qk_clip=100.0).close()


@pytest.mark.parametrize("inside", [False, True])
def test_clamped_queries_and_keys_are_refused(inside: bool) -> None:
    m = Written(to_q=linear(32), to_k=linear(32))
    limits = type("Limits", (), {"clip_qkv": 8.0})()
    setattr(m, *(("config", limits) if inside else ("clip_qkv", 8.0)))
    with pytest.raises(RegardError, match=r"clamped[\s\S]*Written at '' with clip_qkv=8"):
        regard.Monitor(m, qk_clip=100.0)
    m.clip_qkv = limits.clip_qkv = None
    regard.Monitor(m, qk_clip=100.0).close()


def test_one_layer_that_is_refused_does_not_keep_others_from_being_clipped() -> None:
    m = nn.Sequential(Written(ask=linear(32), answer=linear(32)), nn.Flatten(2), Join())
    m.append(regard.nn.MultiHeadAttention(WIDE, 4))
    with regard.Monitor(m, every=1, qk_clip=1e-6, rules=()) as monitor:
        m(3 * x(2, 9, WIDE))
        with pytest.warns(RegardWarning, match="Written at '0'"):
            report = monitor.step()
    assert report is not None
    assert report.layers["0"].clipped == (0, 0, 0, 0)
    assert report.layers["3"].clipped == (1, 1, 1, 1)


class Join(nn.Module):
    """Heads beside each other again, after Flatten has put width to tokens."""

    def forward(self, t: Tensor) -> Tensor:
        return t.unflatten(-1, (9, 8)).transpose(1, 2).flatten(2)


def test_layers_that_are_left_out_may_be_of_any_kind() -> None:
    m = regard.nn.MultiHeadAttention(WIDE, 4, qk_norm=True)
    with regard.Monitor(m, every=1, qk_clip=QKClip(1.0, layers=["other"])) as monitor:
        m(x(1, 5, WIDE))
        monitor.step()


def test_the_largest_of_accumulated_runs_counts() -> None:
    m = Written(qkv=linear(96))
    small, large = x(2, 9, WIDE), 5 * x(2, 9, WIDE, seed=1)
    with regard.Monitor(m, every=1, qk_clip=1.0, rules=()) as monitor:
        m(large)
        m(small)
        monitor.step()
    assert logits(m, large)[""].max() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("rank", [None, 5])
def test_latent_attention_is_held_and_its_values_are_left_alone(rank: int | None) -> None:
    """The rotated part of the keys is one for all heads: queries take its share of the factor."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=3, num_key_value_heads=3, q_lora_rank=rank, kv_lora_rank=6,
        qk_nope_head_dim=5, qk_rope_head_dim=2, v_head_dim=4, first_k_dense_replace=1,
    )  # fmt: skip
    torch.manual_seed(0)
    m = transformers.DeepseekV3ForCausalLM(config)
    for p in m.parameters():
        nn.init.normal_(p, std=0.6)
    ids, path = torch.arange(9)[None], "model.layers.0.self_attn"
    layer = m.get_submodule(path)
    values = layer.kv_b_proj.weight.detach().clone().unflatten(0, (3, 9))[:, 5:]
    with torch.no_grad(), regard.watch(m) as before:
        m(ids)
    threshold = float(before[path].max_logit.median())
    with regard.Monitor(m, every=1, qk_clip=threshold, rules=(), on_error="raise") as monitor:
        m(ids)
        monitor.step()
    with torch.no_grad(), regard.watch(m) as after:
        m(ids)
    want = before[path].max_logit.clamp_max(threshold)
    torch.testing.assert_close(after[path].max_logit, want)
    assert torch.equal(layer.kv_b_proj.weight.unflatten(0, (3, 9))[:, 5:], values)
    layer.q_b_proj.requires_grad_(False) if rank else layer.q_proj.requires_grad_(False)
    with pytest.raises(RegardError, match="keys that several query heads share"):
        QKClip(0.1).clip(path, layer, Kind(3, 7, ""), torch.ones(3))


class Layers(nn.Module):
    """Attention of one input, by several layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, t: Tensor) -> Tensor:
        found: list[Tensor] = [layer(t * (i + 1)) for i, layer in enumerate(self.layers)]
        return torch.stack(found)


def clipped(m: nn.Module, threshold: float = 1.0, on_error: Any = "raise") -> list[Tensor]:
    """The largest logits of each layer's heads before and after a step with QK-clip."""
    found = []
    for _ in range(2):
        with regard.Monitor(
            m,
            every=1,
            qk_clip=QKClip(threshold) if not found else None,
            rules=(),
            on_error=on_error,
        ) as monitor:
            m(x(2, 9, WIDE)).sum().backward()
            report = monitor.step()
        assert report is not None
        found.append(torch.tensor([heads.max_logit for heads in report.layers.values()]))
    return found


@pytest.mark.parametrize("tied", ["module", "weight"])
def test_weights_that_queries_and_keys_share_are_scaled_once(tied: str) -> None:
    q, k = nn.Linear(WIDE, 32), nn.Linear(WIDE, 32)
    if tied == "weight":
        k.weight = q.weight
    m = Written(q_proj=q, k_proj=q if tied == "module" else k)
    if tied == "module":
        m.qk = lambda t: (q(t), q(t))  # type: ignore[method-assign]
    before, after = clipped(m, 0.1)
    assert (before > 0.1).all()
    torch.testing.assert_close(after, torch.full_like(after, 0.1))


def test_layers_that_share_their_weights_are_clipped_by_the_largest_of_all() -> None:
    first = Written(
        q_proj=nn.Linear(WIDE, 32, False), k_proj=nn.Linear(WIDE, 16, False), key_heads=2
    )
    second = Written(
        q_proj=nn.Linear(WIDE, 32, False), k_proj=nn.Linear(WIDE, 16, False), key_heads=2
    )
    for name in ("q_proj", "k_proj"):
        second.get_submodule(name).weight = first.get_submodule(name).weight
    before, after = clipped(Layers(first, second), 0.1)
    torch.testing.assert_close(before[1], 4 * before[0])
    torch.testing.assert_close(after[1], torch.full_like(after[1], 0.1))
    torch.testing.assert_close(after[0], after[1] / 4)


def test_layers_that_share_weights_in_part_are_refused_and_left_as_they_are() -> None:
    first, second, third = (
        Written(q_proj=nn.Linear(WIDE, 32), k_proj=nn.Linear(WIDE, 32)) for _ in range(3)
    )
    second.add_module("k_proj", first.get_submodule("k_proj"))
    m = Layers(first, second, third)
    with pytest.raises(RegardError, match=r"share in part[\s\S]*'layers.0'.*'layers.1'"):
        clipped(m, 0.1)
    with pytest.warns(RegardWarning, match="share in part"):
        before, after = clipped(m, 0.1, "warn")
    torch.testing.assert_close(after[:2], before[:2])
    torch.testing.assert_close(after[2], torch.full_like(after[2], 0.1))
