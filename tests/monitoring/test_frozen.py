"""QK-clip of models that are not trained whole: exact, or refused, and what is frozen stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import RegardError
from regard.errors import RegardWarning
from regard.monitoring import Projections, QKClip
from tests.monitoring import lora
from tests.monitoring.test_qk_clip import (
    WIDE,
    Flipped,
    Interleaved,
    Written,
    huggingface,
    linear,
    logits,
    torch_multihead,
)
from tests.watching.test_watch import x

GIVEN = 3 * x(2, 9, WIDE)


def adapted(outputs: int = 32, frozen: bool = False, bias: bool = True, **how: Any) -> lora.Linear:
    return lora.Linear(linear(outputs, bias), frozen).add("default", **how)


def merged() -> nn.Module:
    m = Written(q_proj=adapted().add("more", scaling=0.5), k_proj=linear(32))
    m.q_proj.merge()
    return m


def switched_off() -> nn.Module:
    m = Written(q_proj=adapted(), k_proj=linear(32))
    m.q_proj.disable_adapters = True
    m.q_proj.lora_B.requires_grad_(False)
    return m


def one_of_two() -> nn.Module:
    m = Written(q_proj=adapted().add("other"), k_proj=linear(32))
    m.q_proj.active_adapters = ["default"]
    m.q_proj.lora_B["other"].requires_grad_(False)
    return m


def frozen_part(name: str, **parts: nn.Module) -> Written:
    m = Written(**parts)
    m.get_submodule(name).requires_grad_(False)
    return m


def half_frozen_multihead() -> nn.Module:
    m = torch_multihead(kdim=WIDE, vdim=WIDE, bias=False)
    # Apart only if widths differ, as PyTorch has it; then each part may be frozen.
    a = m.attention
    a._qkv_same_embed_dim = False
    for name, part in zip("qkv", a.in_proj_weight.detach().chunk(3), strict=True):
        setattr(a, f"{name}_proj_weight", nn.Parameter(part.clone()))
    a.in_proj_weight = None
    a.k_proj_weight.requires_grad_(False)
    return m


CLIPPED: dict[str, Callable[[], nn.Module]] = {
    "adapter on q": lambda: Written(q_proj=adapted(), k_proj=linear(32)),
    "adapters on both": lambda: Written(q_proj=adapted(), k_proj=adapted(scaling=8 / 3**0.5)),
    "adapter with bias": lambda: Written(q_proj=adapted(bias=True), k_proj=linear(32)),
    "several": lambda: Written(q_proj=adapted().add("b", scaling=0.3, rank=5), k_proj=adapted()),
    "one of two": one_of_two,
    "merged": merged,
    "switched off": switched_off,
    "grouped": lambda: Written(4, 2, q_proj=adapted(), k_proj=adapted(16)),
    "on fused": lambda: Written(qkv=adapted(96)),
    "on fused, flipped": lambda: Written(
        c_attn=lora.Linear(Flipped(WIDE, 96), frozen=False).add("default")
    ),
    "head by head": lambda: Interleaved(query_key_value=adapted(96)),
    "adapter of an adapter": lambda: Written(
        q_proj=lora.Linear(adapted(), frozen=False).add("outer"), k_proj=linear(32)
    ),
    "DoRA on frozen weights": lambda: Written(
        q_proj=adapted(frozen=True, bias=False, dora=True), k_proj=linear(32, False)
    ),
    "DoRA on both, frozen": lambda: Written(
        heads=4,
        key_heads=2,
        q_proj=adapted(frozen=True, bias=False, dora=True),
        k_proj=adapted(16, frozen=True, bias=False, dora=True),
    ),
    "DoRA, trained whole": lambda: Written(q_proj=adapted(dora=True), k_proj=adapted(dora=True)),
    "keys frozen": lambda: frozen_part("k_proj", q_proj=linear(32), k_proj=linear(32)),
    "queries frozen": lambda: frozen_part("q_proj", q_proj=linear(32), k_proj=linear(32)),
    "grouped, keys frozen": lambda: _grouped("k_proj"),
    "adapter on frozen queries, keys trained": lambda: Written(
        q_proj=adapted(frozen=True), k_proj=linear(32)
    ),
    "torch, keys frozen": half_frozen_multihead,
}


def _grouped(frozen: str) -> nn.Module:
    m = Written(4, 2, q_proj=linear(32), k_proj=linear(16))
    m.get_submodule(frozen).requires_grad_(False)
    return m


@pytest.mark.parametrize("name", CLIPPED)
def test_the_largest_logit_lands_on_the_threshold_and_what_is_frozen_stays(name: str) -> None:
    torch.manual_seed(0)
    m = CLIPPED[name]().eval()
    (path, before), *_ = logits(m, GIVEN).items()
    threshold = float(before.sort().values[1:3].mean())
    kept = copy.deepcopy(m.state_dict())
    with regard.Monitor(m, every=1, qk_clip=threshold, rules=(), on_error="raise") as monitor:
        m(GIVEN)
        monitor.step()
    after = logits(m, GIVEN)[path]
    torch.testing.assert_close(after, before.clamp_max(threshold), rtol=1e-4, atol=1e-5)
    changed = {n for n, t in m.state_dict().items() if not torch.equal(t, kept[n])}
    frozen = {n for n, p in m.named_parameters() if not p.requires_grad}
    assert changed
    assert not changed & frozen


def test_what_is_merged_comes_out_as_if_it_never_was() -> None:
    torch.manual_seed(0)
    apart = Written(q_proj=adapted(), k_proj=linear(32))
    one = copy.deepcopy(apart)
    one.q_proj.merge()
    threshold = float(logits(apart, GIVEN)[""].min())
    for m in (apart, one):
        with regard.Monitor(m, every=1, qk_clip=threshold, rules=()) as monitor:
            m(GIVEN)
            monitor.step()
    one.q_proj.unmerge()
    torch.testing.assert_close(one.state_dict(), apart.state_dict(), rtol=1e-4, atol=1e-5)


def test_dropout_before_an_adapter_changes_nothing() -> None:
    m = Written(q_proj=adapted(dropout=0.5), k_proj=linear(32)).train()

    def run() -> dict[str, Tensor]:
        torch.manual_seed(1)
        return logits(m, GIVEN)

    before = run()[""]
    threshold = float(before.min())
    with regard.Monitor(m, every=1, qk_clip=threshold, rules=()) as monitor:
        torch.manual_seed(1)
        m(GIVEN)
        monitor.step()
    torch.testing.assert_close(run()[""], before.clamp_max(threshold), rtol=1e-4, atol=1e-5)


class IA3(nn.Module):
    """An adapter that multiplies."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.ia3_l = base_layer, nn.Parameter(torch.ones(32))
        self.weight = base_layer.weight

    def forward(self, t: Tensor) -> Tensor:
        return self.base_layer(t) * self.ia3_l


class Inline(nn.Linear):
    """LoRA inside of the projection, as other packages have it."""

    def __init__(self) -> None:
        super().__init__(WIDE, 32)
        self.lora_a, self.lora_b = nn.Linear(WIDE, 2), nn.Linear(2, 32)

    def forward(self, t: Tensor) -> Tensor:
        return super().forward(t) + self.lora_b(self.lora_a(t))


class Arrow:
    pass


def of_a_kind() -> nn.Module:
    m = Written(q_proj=adapted(), k_proj=linear(32))
    m.q_proj.lora_variant["default"] = Arrow()
    return m


def normalised(layer: nn.Linear) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "adapter on frozen weights": (
        lambda: Written(q_proj=adapted(frozen=True), k_proj=lora.Linear(linear(32)).add("default")),
        r"Written at '' with q_proj\.base_layer\.weight, q_proj\.base_layer\.bias, "
        r"k_proj\.base_layer\.weight, k_proj\.base_layer\.bias frozen",
    ),
    "adapter on q alone": (
        lambda: frozen_part("k_proj", q_proj=adapted(frozen=True), k_proj=linear(32)),
        "what an adapter adds to a frozen weight cannot scale the sum",
    ),
    "bias alone is frozen": (
        lambda: frozen_bias(Written(q_proj=linear(32), k_proj=linear(32))),
        r"q_proj\.bias, k_proj\.bias frozen",
    ),
    "DoRA with a frozen bias": (
        lambda: frozen_part("k_proj", q_proj=adapted(frozen=True, dora=True), k_proj=linear(32)),
        r"q_proj\.base_layer\.bias, k_proj\.weight, k_proj\.bias frozen",
    ),
    "DoRA with dropout": (
        lambda: Written(q_proj=adapted(dora=True, dropout=0.1), k_proj=linear(32)),
        "has dropout inside DoRA",
    ),
    "two DoRA": (
        lambda: Written(q_proj=adapted(dora=True).add("b", dora=True), k_proj=linear(32)),
        r"adds up several \(default, b\), one of them DoRA",
    ),
    "another kind of LoRA": (of_a_kind, "is of the kind Arrow"),
    "another kind of adapter": (
        lambda: Written(q_proj=IA3(linear(32)), k_proj=linear(32)),
        "IA3, which is no low-rank adapter of PEFT's",
    ),
    "an adapter inside": (
        lambda: Written(q_proj=Inline(), k_proj=linear(32)),
        r"Inline 'q_proj' with lora_a\.bias, lora_a\.weight",
    ),
    "weights that are made of others": (
        lambda: Written(q_proj=normalised(linear(32)), k_proj=linear(32)),
        r"'q_proj' with parametrizations\.weight\.original0",
    ),
    "torch's weights that are made of others": (
        lambda: parametrized_multihead(),
        r"with parametrizations\.in_proj_weight\.original0",
    ),
}


def frozen_bias(m: Any) -> nn.Module:
    m.q_proj.bias.requires_grad_(False)
    m.k_proj.bias.requires_grad_(False)
    return m


def parametrized_multihead() -> nn.Module:
    m = torch_multihead()
    nn.utils.parametrizations.weight_norm(m.attention, "in_proj_weight")
    return m


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_clipped_exactly_is_refused_before_anything_runs(name: str) -> None:
    make, words = REFUSED[name]
    m = make()
    with pytest.raises(RegardError, match=words) as told:
        regard.Monitor(m, qk_clip=5.0)
    assert "QKClip(layers=" in str(told.value)
    with regard.Monitor(m, qk_clip=QKClip(5.0, layers="other"), every=1, rules=()) as monitor:
        m(GIVEN)
        monitor.step()


def test_keys_that_heads_share_cannot_be_scaled_alone() -> None:
    """Known only when the module has run, and said how many heads there are."""
    m = _grouped("q_proj")
    kept = copy.deepcopy(m.state_dict())
    with regard.Monitor(m, every=1, qk_clip=0.1, rules=()) as monitor:
        m(GIVEN)
        with pytest.warns(RegardWarning, match="and keys that several query heads share"):
            report = monitor.step()
        m(GIVEN)
        monitor.step()
    assert report is not None
    assert report.layers[""].clipped == (0, 0, 0, 0)
    torch.testing.assert_close(m.state_dict(), kept, rtol=0, atol=0)


@pytest.mark.parametrize("told", [False, True])
def test_a_layer_that_is_frozen_whole_is_left_alone_with_a_word(told: bool) -> None:
    m = Written(q_proj=linear(32), k_proj=linear(32), v_proj=linear(32)).requires_grad_(False)
    m.v_proj.requires_grad_(True)

    def find(path: str, module: Any) -> Projections:
        q, k = ([part.weight.data.unflatten(0, (4, 8))] for part in (module.q_proj, module.k_proj))
        return Projections(q, k)

    kept = copy.deepcopy(m.state_dict())
    clip = QKClip(0.1, projections=find if told else None)
    with regard.Monitor(m, every=1, qk_clip=clip, rules=(), on_error="raise") as monitor:
        m(GIVEN)
        with pytest.warns(RegardWarning, match=r"leaves alone what is frozen: .* of \(model\)"):
            monitor.step()
        m(GIVEN)
        monitor.step()
    torch.testing.assert_close(m.state_dict(), kept, rtol=0, atol=0)


def test_a_frozen_part_of_a_model_does_not_keep_the_rest_from_being_clipped() -> None:
    parts = [regard.nn.MultiHeadAttention(WIDE, 4, qk_norm=bool(i)) for i in (1, 1, 1, 1, 0)]
    m = nn.Sequential(*parts)
    m[:4].requires_grad_(False)
    with regard.Monitor(m, every=1, qk_clip=1e-9, rules=()) as monitor:
        m(GIVEN)
        with pytest.warns(RegardWarning, match="projections of 0, 1, 2 and 1 more"):
            report = monitor.step()
    assert report is not None
    assert sum(report.layers["4"].clipped) > 0


def test_projections_that_are_told_are_changed_only_where_they_train() -> None:
    m = Written(q_proj=linear(32), k_proj=linear(32))
    m.k_proj.requires_grad_(False)

    def find(path: str, module: Any) -> Projections:
        # Views of .data, and made without gradients, do not say themselves whether they train.
        q = [t.data.unflatten(0, (4, 8)) for t in (module.q_proj.weight, module.q_proj.bias)]
        with torch.no_grad():
            k = [t.unflatten(0, (4, 8)) for t in (module.k_proj.weight, module.k_proj.bias)]
        return Projections(q, k)

    before = logits(m, GIVEN)[""]
    kept = m.k_proj.weight.clone()
    threshold = float(before.min())
    with regard.Monitor(
        m, every=1, qk_clip=QKClip(threshold, projections=find), rules=()
    ) as monitor:
        m(GIVEN)
        monitor.step()
    torch.testing.assert_close(logits(m, GIVEN)[""], torch.full((4,), threshold))
    assert torch.equal(m.k_proj.weight, kept)


def test_layers_of_the_monitor_that_are_left_out_are_not_asked() -> None:
    m = nn.ModuleDict({"a": Written(q_proj=adapted(frozen=True), k_proj=linear(32, False))})
    m["a"].k_proj.requires_grad_(False)
    regard.Monitor(m, qk_clip=5.0, layers="b").close()
    with pytest.raises(RegardError, match="what is frozen"):
        regard.Monitor(m, qk_clip=5.0)


class Mixer(nn.Module):
    """A layer that is no attention, and shares a name with some that are."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = adapted(32, frozen=True)

    def forward(self, t: Tensor) -> Tensor:
        out: Tensor = self.in_proj(t)
        return out


def test_layers_that_do_not_attend_are_not_refused() -> None:
    m = nn.Sequential(Mixer(), regard.nn.MultiHeadAttention(WIDE, 4))
    with regard.Monitor(m, every=1, qk_clip=1e-6, rules=()) as monitor:
        m(GIVEN)
        report = monitor.step()
    assert report is not None
    assert report.layers["1"].clipped == (1, 1, 1, 1)


KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "bias": {"lora_bias": True},
    "merged": {},
    "DoRA": {"use_dora": True},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_peft_itself(kind: str, trained: bool) -> None:
    """The stand-in is like the original: clipped exactly, or refused, and nothing frozen moves."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    inner = huggingface("Llama", intermediate_size=32, num_key_value_heads=2, attention_bias=True)
    if kind == "DoRA":
        inner = huggingface("Llama", intermediate_size=32, num_key_value_heads=2)
    config = peft.LoraConfig(
        target_modules=["q_proj", "k_proj"], r=4, init_lora_weights=False, **KINDS[kind]
    )
    m = peft.inject_adapter_in_model(config, inner)
    if trained:
        m.requires_grad_(True)
    if kind == "merged":
        for part in m.modules():
            if isinstance(part, peft.tuners.lora.Linear):
                part.merge()
    before = logits(m, GIVEN)
    first = next(iter(before))
    threshold = float(before[first].sort().values[1:3].mean())
    kept = copy.deepcopy(m.state_dict())
    clip = QKClip(threshold, layers=first)
    if not trained and kind != "DoRA":
        with pytest.raises(RegardError, match="would have to change what is frozen"):
            regard.Monitor(m, qk_clip=clip)
        return
    with regard.Monitor(m, every=1, qk_clip=clip, rules=(), on_error="raise") as monitor:
        m(GIVEN)
        monitor.step()
    after = logits(m, GIVEN)[first]
    torch.testing.assert_close(after, before[first].clamp_max(threshold), rtol=1e-4, atol=1e-5)
    changed = {n for n, t in m.state_dict().items() if not torch.equal(t, kept[n])}
    assert changed
    assert not changed & {n for n, p in m.named_parameters() if not p.requires_grad}


def test_peft_around_torchs_module_is_refused() -> None:
    peft = pytest.importorskip("peft")
    m = torch_multihead()
    config = peft.LoraConfig(target_modules=["attention"], r=4, init_lora_weights=False)
    m = peft.inject_adapter_in_model(config, m)
    with pytest.raises(RegardError, match=r"in_proj_weight.* frozen"):
        regard.Monitor(m, qk_clip=1.0)
