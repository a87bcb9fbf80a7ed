"""The short way of attn_implementation="regard": taken by calls that ask for nothing else, and left
by any call that does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from regard import RegardError, masks
from regard.calls import watchers
from regard.calls.kinds import unshared
from regard.calls.watchers import gives_turned
from regard.values import Shape

transformers = pytest.importorskip("transformers")

from regard.watching.huggingface import (  # noqa: E402
    attention,
    by_name,
    cached_keys,
    interface,
)
from regard.watching.huggingface.plain_calls import plain_output, plain_run  # noqa: E402
from regard.watching.huggingface.symbolic_mask import SymbolicMask  # noqa: E402
from tests.watching.huggingface.test_by_name import both, close  # noqa: E402
from tests.watching.huggingface.test_huggingface import tokens  # noqa: E402

CPU = torch.device("cpu")


class Layer(nn.Module):
    is_causal = True


def symbolic(Q: int, K: int, mask: masks.Mask | None = None) -> SymbolicMask:
    return SymbolicMask.of(masks.causal() if mask is None else mask, Shape(1, 1, Q, K), CPU)


def call(Q: int = 6, K: int = 9, B: int = 1) -> dict[str, Any]:
    """What transformers gives a layer: heads come out of the last axis."""
    q = torch.randn(B, Q, 4, 8).transpose(1, 2)
    k, v = (torch.randn(B, K, 2, 8).transpose(1, 2) for _ in range(2))
    return {"module": Layer(), "query": q, "key": k, "value": v, "attention_mask": symbolic(Q, K)}


def expected(given: dict[str, Any], allowed: Tensor) -> Tensor:
    q, k, v = (given[name] for name in ("query", "key", "value"))
    out = F.scaled_dot_product_attention(q, k, v, allowed, enable_gqa=True)
    return out.transpose(1, 2)


def lower(Q: int, K: int) -> Tensor:
    return torch.ones(Q, K, dtype=torch.bool).tril(K - Q)


def attend(given: dict[str, Any], **others: Any) -> Tensor:
    return by_name.attend_by_name(**given, **others)[0]


def short(given: dict[str, Any], **others: Any) -> Any:
    """What the short way would run, if it takes a call."""
    told: dict[str, Any] = {"scaling": None, "is_causal": None, "sliding_window": None}
    told |= {name: others.pop(name) for name in list(others) if name in told}
    return plain_run(**given, **told, others=others)


def known(**how: Any) -> dict[str, Any]:
    """A call that the short way takes, by what it remembers of the first one too."""
    given = call(**how)
    for _ in range(3):
        attend(given)
    assert short(given) is not None
    assert given["attention_mask"].alikes
    return given


@pytest.mark.parametrize(("Q", "K"), [(1, 9), (6, 6), (6, 9)], ids=["a step", "a prompt", "more"])
def test_a_call_is_right_the_first_time_and_after(Q: int, K: int) -> None:
    mask = symbolic(Q, K)
    for _ in range(4):
        given = call(Q, K) | {"attention_mask": mask}
        torch.testing.assert_close(attend(given), expected(given, lower(Q, K)))
        assert attend(given).is_contiguous()


def test_layers_with_one_mask_that_are_not_alike() -> None:
    """Heads, types and strides differ from layer to layer; their mask does not."""
    mask = symbolic(6, 9)
    for _ in range(3):
        for B, change in (
            (1, lambda t: t), (1, lambda t: t.contiguous()), (1, lambda t: t.double()),
            (3, lambda t: t), (1, lambda t: t[..., ::2]), (1, lambda t: F.pad(t, (1, 0))[..., 1:]),
        ):  # fmt: skip
            given = call(6, 9, B) | {"attention_mask": mask}
            given |= {name: change(given[name]) for name in ("query", "key", "value")}
            torch.testing.assert_close(attend(given), expected(given, lower(6, 9)))


def test_kinds_that_share_a_mask_are_all_recognised() -> None:
    """Layers of other widths, and models that are asked by turns."""
    given = known()
    mask = given["attention_mask"]
    others = [call(B=B) | {"attention_mask": mask} for B in (2, 3)]
    for _ in range(3):
        for other in (*others, given):
            attend(other)
    seen = mask.alikes
    assert len(seen) == 3
    for _ in range(2):
        for other in (*others, given):
            torch.testing.assert_close(attend(other), expected(other, lower(6, 9)))
    assert mask.alikes is seen


def test_of_many_kinds_some_are_kept() -> None:
    given = known()
    for B in range(2, 12):
        for _ in range(3):
            attend(call(B=B) | {"attention_mask": given["attention_mask"]})
    assert 1 < len(given["attention_mask"].alikes) < 8
    torch.testing.assert_close(attend(given), expected(given, lower(6, 9)))


def test_the_next_text_of_a_length_is_given_the_same_mask() -> None:
    shape = Shape(1, 1, 6, 9)
    made = SymbolicMask.shared(masks.causal(), shape, CPU)
    assert SymbolicMask.shared(masks.causal(), shape, CPU) is made
    assert SymbolicMask.shared(masks.window(3, 0), shape, CPU).mask == masks.window(3, 0)
    assert SymbolicMask.shared(masks.causal(), Shape(1, 1, 6, 8), CPU).lengths == (6, 8)
    with torch.inference_mode():
        inside = SymbolicMask.shared(masks.causal(), shape, CPU)
        assert inside.is_inference()
        assert SymbolicMask.shared(masks.causal(), shape, CPU) is inside
    assert not SymbolicMask.shared(masks.causal(), shape, CPU).is_inference()
    # What tensors say may be other in the next batch.
    padded = masks.causal() & masks.padding(torch.tensor([7]))
    first, second = (SymbolicMask.shared(padded, shape, CPU) for _ in range(2))
    assert first is not second


def test_layers_of_padded_prompts_are_recognised() -> None:
    """Their mask was made for them, and holds tensors that nobody writes to."""
    for _ in range(2):  # two batches
        real = torch.ones(2, 9, dtype=torch.bool)
        real[0, :4] = False
        mask = masks.causal() & unshared(masks.keep(real[:, None, None]))
        padded = SymbolicMask.shared(mask, Shape(2, 1, 6, 9), CPU)
        allowed = lower(6, 9) & real[:, None, None]
        for layer in range(4):
            given = call(B=2) | {"attention_mask": padded}
            torch.testing.assert_close(attend(given), expected(given, allowed))
            assert (len(padded.alikes) > 0) == (layer > 0)
        assert len(padded.alikes) == 1


def test_none_as_a_mask() -> None:
    for Q, K, causal, allowed in (
        (1, 9, True, lower(1, 9)), (6, 6, True, lower(6, 6)), (6, 6, False, lower(1, 6)),
        (6, 9, True, torch.ones(6, 9, dtype=torch.bool).tril()),
    ):  # fmt: skip
        for _ in range(3):
            given = call(Q, K) | {"attention_mask": None}
            out = attend(given, is_causal=causal)
            torch.testing.assert_close(out, expected(given, allowed))
        assert short(given, is_causal=causal) is not None


MORE: dict[str, Any] = {
    "output_attentions": True,
    "softcap": 2.0,
    "s_aux": torch.zeros(4),
    "position_bias": torch.zeros(1, 4, 6, 9),
    "indices": torch.zeros(1, 6, 1, dtype=torch.int64),
    "cu_seq_lens_q": torch.tensor([0, 6]),
    "cache": object(),
    "whatever": 1,
}


@pytest.mark.parametrize("name", MORE)
def test_what_else_is_asked_for_goes_the_long_way(name: str) -> None:
    given = known()
    assert short(given, **{name: MORE[name]}) is None
    for nothing in (None, False):
        assert short(given, **{name: nothing}) is not None
    assert short(given, position_ids=torch.arange(6), use_cache=True) is not None


def test_arguments_that_change_the_answer_are_seen() -> None:
    given = known()
    plain = attend(given)
    for others in ({"softcap": 0.1}, {"scaling": 3.0}, {"s_aux": torch.full((4,), 5.0)}):
        assert not torch.allclose(attend(given, **others), plain)
        torch.testing.assert_close(attend(given), plain)
    bias = torch.randn(1, 4, 6, 9)
    assert not torch.allclose(attend(given, position_bias=bias), plain)
    dropped = [attend(given, dropout=0.5) for _ in range(2)]
    assert not torch.equal(*dropped)
    with pytest.raises(RegardError, match="whatever="):
        attend(given, whatever=1)
    assert by_name.attend_by_name(**given, output_attentions=True)[1] is not None


def test_a_mask_in_the_place_of_another_is_seen() -> None:
    given = known()
    given["attention_mask"].mask = masks.window(2, 0)
    distance = torch.arange(6)[:, None] + 3 - torch.arange(9)
    band = (distance >= 0) & (distance <= 2)
    torch.testing.assert_close(attend(given), expected(given, band))
    given["attention_mask"].mask = None
    everything = torch.ones(6, 9, dtype=torch.bool)
    torch.testing.assert_close(attend(given), expected(given, everything))


def test_a_mask_for_other_lengths_is_refused_in_words() -> None:
    given = known()
    attend(call(5, 9))
    for _ in range(2):
        with pytest.raises(RegardError, match="made for other lengths"):
            attend(call(5, 9) | {"attention_mask": given["attention_mask"]})


def test_a_scale_that_is_no_number_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    given = known()
    attend(given, scaling=0.5)
    given = given | {"attention_mask": symbolic(6, 9)}
    for _ in range(3):
        attend(given, scaling=0.5)
    with pytest.raises(RegardError, match="scale is a number"):
        attend(given, scaling=torch.ones(4))


def test_a_mask_that_was_used_can_be_sent_and_copied() -> None:
    given = known()
    used = given["attention_mask"]
    for same in (pickle.loads(pickle.dumps(used)), copy.deepcopy(used)):
        assert (same.mask, same.lengths, same.alikes) == (used.mask, used.lengths, ())
        want = attend(given)
        for _ in range(2):
            torch.testing.assert_close(attend(given | {"attention_mask": same}), want)


def test_a_window_without_a_mask_is_refused_in_words() -> None:
    given = call(6, 9) | {"attention_mask": None}
    for _ in range(2):
        attend(given)
    with pytest.raises(RegardError, match="gives no mask to place it by"):
        attend(given, sliding_window=3)


def test_queries_for_a_whole_batch() -> None:
    given = call(6, 9, 3)
    given["query"] = given["query"][:1]
    for _ in range(3):
        assert attend(given).shape == (3, 6, 4, 8)


class Asked(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None):
        self.asked.append(function)
        return function(*args, **(kwargs or {}))


class Watching:
    def __enter__(self) -> None:
        watchers.begin(self.see)

    def see(self, trace: Any) -> None:
        self.trace = trace

    def __exit__(self, *_: object) -> None:
        watchers.end(self.see)


class Collecting:
    def __enter__(self) -> None:
        self.before = attention.collector.set({"attentions": []})

    def __exit__(self, *_: object) -> None:
        attention.collector.reset(self.before)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a function mode": Asked,
    "a watcher": Watching,
    "weights are collected": Collecting,
}


@pytest.mark.parametrize("around", AROUND)
def test_who_is_about(around: str) -> None:
    given = known()
    want = attend(given)
    for _ in range(2):
        with AROUND[around]():
            assert short(given) is None
            torch.testing.assert_close(attend(given), want)
        assert short(given) is not None


def test_a_function_mode_is_asked_about_nothing() -> None:
    given = known()
    with Asked() as mode:
        attend(given)
    assert F.scaled_dot_product_attention not in mode.asked


def test_a_watcher_is_shown_the_call() -> None:
    given, one = known(), Watching()
    with one:
        attend(given)
    assert one.trace.inputs.shape == (1, 4, 6, 9)


def test_keys_that_a_press_hides() -> None:
    given = known()
    given["module"].masked_key_indices = torch.zeros(1)
    assert short(given) is None
    given["module"].masked_key_indices = None
    assert short(given) is not None


class Choosing:
    cache, waits, keys, saw_it = None, False, None, False

    def mask(self, query: Tensor, given: Tensor | None) -> Tensor | None:
        return given

    def saw(self, trace: Any) -> None:
        self.saw_it, self.waits = True, False


def test_a_cache_that_waits_for_the_call() -> None:
    given, layer = known(), Choosing()
    layer.keys = given["key"]
    cached_keys.expect(layer)
    attend(given)
    assert layer.saw_it
    assert short(given) is not None


def test_a_mask_that_was_lent_with_the_keys() -> None:
    given = known()
    cached_keys.lend(given["key"], symbolic(6, 9, masks.causal(0)))
    start = torch.ones(6, 9, dtype=torch.bool).tril()
    torch.testing.assert_close(attend(given), expected(given, start))


def test_layers_of_a_model_in_other_states() -> None:
    """Between two layers of one forward pass somebody turns gradients or autocast on or off."""
    for state in (torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)):
        eager, ours = both("llama")
        answers = []
        for model in (eager, ours):
            layers = model.model.layers
            plain = layers[-1].forward

            def forward(*given: Any, plain: Any = plain, state: Any = state, **how: Any) -> Any:
                with state():
                    return plain(*given, **how)

            layers[-1].forward = forward
            for around in (nullcontext, torch.no_grad, nullcontext):
                with around():
                    answers.append(model(tokens()).logits)
        for want, got in zip(answers[:3], answers[3:], strict=True):
            assert got.requires_grad == want.requires_grad
            close(got, want, times=2 if state in (torch.no_grad, torch.enable_grad) else 5e4)


def watched_short(given: dict[str, Any], **how: Any) -> Tensor | None:
    """What the short way would give a model that is watched, if it takes a call."""
    return plain_output(**given, how={"scaling": None, **how})


def test_the_short_way_of_a_watched_model() -> None:
    given, one = call(), Watching()
    assert watched_short(given) is None
    with one:
        for _ in range(3):
            given = call() | {"attention_mask": given["attention_mask"]}
            want = interface._attend(**given, scaling=None)[0]
        found = watched_short(given, sliding_window=5, is_causal=True, position_ids=None)
        assert found is not None
        assert found.is_contiguous()
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(found, expected(given, lower(6, 9)))
        assert one.trace.inputs.q is given["query"]
        assert not gives_turned.get()
        for name, value in MORE.items():
            assert watched_short(given, **{name: value}) is None
        assert watched_short(given, scaling=3.0) is None
        assert watched_short(call(B=2) | {"attention_mask": given["attention_mask"]}) is None
        with Asked():
            assert watched_short(given) is None


def test_a_watched_mask_for_other_lengths_is_refused_in_words() -> None:
    """Also where it is the mask of a call that is known, and only says other lengths."""
    causal = masks.causal()
    with Watching():
        for _ in range(3):
            given = call(5, 9) | {"attention_mask": symbolic(5, 9, causal)}
            interface._attend(**given, scaling=None)
        assert watched_short(given) is not None
        wrong = given | {"attention_mask": symbolic(6, 9, causal)}
        for _ in range(2):
            with pytest.raises(RegardError, match="made for other lengths"):
                interface._attend(**wrong, scaling=None)
