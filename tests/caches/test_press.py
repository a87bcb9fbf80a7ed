"""A press for kvpress: the ranking of eager attention, and AdaKV around it. By kvpress itself where
it is installed, and else by its protocol: a scorer that `compress` asks, after each layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import caches

transformers = pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from regard.watching.huggingface import by_name  # noqa: E402
from regard.watching.huggingface.switch import own_functions  # noqa: E402


@dataclass
class Scorer:
    """What a press is to kvpress: it keeps the best by score."""

    compression_ratio: float = 0.0

    def __post_init__(self) -> None:
        assert 0 <= self.compression_ratio < 1

    def compress(self, module: Any, hidden: Tensor, k: Tensor, v: Tensor, w: Any, kw: Any) -> Any:
        kept = max(1, int(k.shape[2] * (1 - self.compression_ratio)))
        best = self.score(module, hidden, k, v, w, kw).topk(kept, dim=-1).indices  # type: ignore[attr-defined]
        at = best[..., None].expand(-1, -1, -1, k.shape[-1])
        return k.gather(2, at), v.gather(2, at)


def queries(module: Any, hidden: Tensor) -> Tensor:
    return module.q_proj(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)  # type: ignore[no-any-return]


def patched(function: Any) -> Any:
    def wrapper(module: Any, *args: Any, **how: Any) -> Any:
        return function(module, *args, **how)

    return wrapper


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class, of kvpress or of what stands in for it."""
    try:
        import kvpress  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        parts: dict[str, dict[str, Any]] = {
            "kvpress": {},
            "kvpress.presses": {},
            "kvpress.attention_patch": {"attention_patch": patched},
            "kvpress.presses.scorer_press": {"ScorerPress": Scorer},
            "kvpress.utils": {"get_prerope_query_states": queries},
        }
        for name, inside in parts.items():
            module = ModuleType(name)
            vars(module).update(inside)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "regard.caches.press", raising=False)
        own = list(own_functions)
        yield caches.ReceivedPress
        sys.modules.pop("regard.caches.press", None)
        ALL_ATTENTION_FUNCTIONS["regard"], own_functions[:] = by_name.attend_by_name, own
    else:
        yield caches.ReceivedPress


def build(implementation: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=3, attn_implementation=implementation,
        eos_token_id=None,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    for weight in made.parameters():
        weight.data.mul_(3)
    return made


TEXT = torch.randint(1, 61, (2, 40), generator=torch.Generator().manual_seed(0))


def scored(model: Any, press: Any, **how: Any) -> list[Tensor]:
    """The scores of each layer, asked for as kvpress's hooks do."""
    found: list[Tensor] = []

    def ask(module: Any, _: Any, kwargs: Any, output: Any) -> None:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        hidden = kwargs["hidden_states"]
        found.append(press.score(module, hidden, layer.keys, layer.values, output[1], kwargs))

    hooks = [
        layer.self_attn.register_forward_hook(ask, with_kwargs=True) for layer in model.model.layers
    ]
    with torch.no_grad():
        model(TEXT, past_key_values=transformers.DynamicCache(), **how)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(
    ("implementation", "how"),
    [("regard", {}), ("sdpa", {}), ("regard", {"output_attentions": True})],
    ids=["regard", "sdpa", "the model's own pass"],
)
@pytest.mark.parametrize("padded", [False, True])
def test_the_ranking_is_that_of_eager_attention(
    kind: Any, implementation: str, how: dict[str, Any], padded: bool
) -> None:
    real = torch.ones_like(TEXT)
    real[1, : 9 * padded] = 0
    mask = {"attention_mask": real}
    with torch.no_grad():
        weights = build("eager")(TEXT, output_attentions=True, **mask).attentions
    for average in (True, False):
        press = kind(0.5, average=average)
        found = scored(build(implementation), press, **how, **mask)
        for layer, got in enumerate(found):
            # Rows of padding see nothing here, and everything there.
            per_key = (weights[layer] * real[:, None, :, None]).sum(2)
            per_key = per_key / torch.arange(40, 0, -1) if average else per_key
            want = per_key.view(2, 3, 2, 40).mean(2)
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
            for b, start in ((0, 0), (1, 9 * padded)):
                assert torch.equal(got[b, :, start:].argsort(-1), want[b, :, start:].argsort(-1))


SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "head_dim": 8, "layer_types": ["full_attention"], "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    "cohere": {},
    "stablelm": {"partial_rotary_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_sinks_and_rotations_are_those_of_the_model(kind: Any, name: str) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for weight in model.eval().parameters():
        weight.data.mul_(5)
    module = model.model.layers[0].self_attn
    module.head_dim = 8
    if name == "gpt_oss":
        module.sinks.data = torch.tensor([3.0, -3, 2, 0])
    press, seen = kind(0.5, average=False), []

    def ask(module: Any, _: Any, kwargs: Any, output: Any) -> None:
        layer = kwargs["past_key_values"].layers[0]
        given = module, kwargs["hidden_states"], layer.keys, layer.values, None, kwargs
        seen.append((press.score(*given), output[1]))

    module.register_forward_hook(ask, with_kwargs=True)
    with torch.no_grad():
        model(TEXT, past_key_values=transformers.DynamicCache())
    ((got, weights),) = seen
    torch.testing.assert_close(got, weights.sum(2).view(2, 2, 2, 40).mean(2), atol=1e-5, rtol=1e-4)


def test_a_window_without_a_mask_and_unknown_rotations_are_refused(kind: Any) -> None:
    k, hidden = torch.randn(1, 3, 40, 8), torch.randn(1, 40, 48)
    module = build("regard").model.layers[0].self_attn
    module.sliding_window = 7
    with pytest.raises(regard.RegardError, match=r"(?s)window and gives no mask.*sliding_window=7"):
        kind(0.5).score(module, hidden, k, k, None, {})

    class Unknown(type(module)):  # type: ignore[misc]
        pass

    other = Unknown(module.config, 0)
    with pytest.raises(regard.RegardError, match=r"(?s)how Unknown rotates.*output_attentions"):
        kind(0.5).score(other, hidden, k, k, None, {"position_embeddings": (k, k)})


def test_models_can_be_watched_beside_a_press(kind: Any) -> None:
    kind(0.5)
    model, cache = build("regard"), transformers.DynamicCache()
    with regard.watch(model) as seen, torch.no_grad():
        model(TEXT, past_key_values=cache)
    assert len(list(seen)) == 2
    # What AdaKV takes from single heads is hidden by kvpress alone.
    model.model.layers[0].self_attn.masked_key_indices = tuple(torch.zeros(3, 1).long())
    with pytest.raises(regard.RegardError, match="kvpress hides"), regard.watch(model):
        model(TEXT[:, :1], past_key_values=cache)


@pytest.mark.parametrize("implementation", ["regard", "sdpa"])
def test_models_can_be_watched_when_kvpress_came_later(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wraps every function that is there when it is imported."""
    module = ModuleType("kvpress.attention_patch")
    source = """
def attention_patch(func):
    def wrapper(module, *args, **how):
        return func(module, *args, **how)

    return wrapper
"""
    exec(source, vars(module))
    own = ALL_ATTENTION_FUNCTIONS[implementation]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, implementation, module.attention_patch(own))
    model = build(implementation)
    # Taken from heads in a text that has ended.
    model.model.layers[0].self_attn.masked_key_indices = tuple(torch.zeros(3, 1).long())
    with regard.watch(model) as seen, torch.no_grad():
        model(TEXT)
    assert len(list(seen)) == 2
    assert model.model.layers[0].self_attn.masked_key_indices is None


def test_it_presses(kind: Any) -> None:
    press = kind(0.75)
    k, v, hidden = torch.randn(1, 3, 40, 8), torch.randn(1, 3, 40, 8), torch.randn(1, 40, 48)
    module = build("regard").model.layers[0].self_attn
    small, _ = press.compress(module, hidden, k, v, None, {})
    assert small.shape == (1, 3, 10, 8)


def test_kvpress_puts_adakv_around_it() -> None:
    kvpress = pytest.importorskip("kvpress")
    model = build("regard")
    cache, context, question = transformers.DynamicCache(), TEXT[:1], TEXT[1:, :1]
    with torch.no_grad(), kvpress.AdaKVPress(caches.ReceivedPress(0.6))(model):
        model(context, past_key_values=cache)
    gone = model.model.layers[0].self_attn.masked_key_indices
    with torch.no_grad():
        pressed = model(question, past_key_values=cache, position_ids=torch.tensor([[40]])).logits
    # All keys are there still; those that AdaKV took must not be seen.
    eager, seen = build("eager"), {}
    scores = scored(build("regard"), caches.ReceivedPress(0.6))[0][:1]
    for h, i in zip(gone[1].tolist(), gone[2].tolist(), strict=True):
        seen.setdefault(h, []).append(i)
    assert sum(map(len, seen.values())) == 3 * 24
    kept = [scores[0, h][[i for i in range(40) if i not in seen[h]]].min() for h in range(3)]
    assert all(float(scores[0, h][seen[h]].max()) <= float(max(kept)) for h in range(3))
    whole = transformers.DynamicCache()
    with torch.no_grad():
        eager(context, past_key_values=whole)
        plain = eager(question, past_key_values=whole).logits
    assert not torch.allclose(pressed, plain, atol=1e-3)


def test_without_kvpress_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress.attention_patch", None)
    monkeypatch.delitem(sys.modules, "regard.caches.press", raising=False)
    with pytest.raises(regard.RegardError, match=r"(?s)press of kvpress.*regard\[kvpress\]"):
        caches.ReceivedPress(0.5)
    sys.modules.pop("regard.caches.press", None)


@pytest.mark.parametrize("name", ["EvictingCache", "ReceivedPress"])
def test_without_transformers_the_extra_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "find_spec", lambda _: None)
    with pytest.raises(regard.RegardError, match=r"not installed\n.*'regard\[huggingface\]'"):
        getattr(caches, name)
