"""Traces of calls that others made: the same answers as of calls that regard made."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import regard
from regard import RegardError, Trace, biases, masks
from regard.backends.tiled import Tiled
from regard.calls.given_traces import given_trace

N, H, G, D = 23, 4, 2, 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return draw(2, H, N, D), draw(2, G, N, D, seed=1), draw(2, G, N, 5, seed=2)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window and sink": {"mask": masks.causal() & masks.window(5), "sink": draw(H, seed=3)},
    "padding": {"mask": masks.padding(torch.tensor([N, 7])), "softcap": 3.0},
    "bias": {"bias": biases.dense(draw(1, H, N, N, seed=4)), "scale": 0.2},
}


def asked(t: Trace) -> dict[str, Tensor]:
    return {
        "weights": t.weights(),
        "received": t.received(),
        "top": t.top(3).values,
        "map": t.map(4),
        "mass": t.mass([0, 3]),
        "logits": t.logits(queries=[2, 5]),
        "max_logit": t.max_logit,
        "entropy": t.entropy,
        "one head": t[1, [2]].weights(queries=[3]),
        "one head's entropy": t[1, [2]].entropy,
    }


@pytest.mark.parametrize("name", CALLS)
def test_answers_are_those_of_the_same_call(name: str) -> None:
    q, k, v = qkv()
    own = regard.trace(q, k, v, **CALLS[name])
    given = Trace.of(q, k, own.lse, v=v, **CALLS[name])
    expected, found = asked(own), asked(given)
    for what, value in expected.items():
        torch.testing.assert_close(found[what], value, msg=lambda m, w=what: f"{w}: {m}")
    torch.testing.assert_close(given.out, own.out)
    assert repr(given) == repr(own)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_flex_attention_computed_can_be_looked_into() -> None:
    q, k, v = (draw(1, 2, 32, D, seed=i) for i in range(3))
    causal = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 32, 32, device="cpu")
    out, more = flex_attention(q, k, v, block_mask=causal, return_aux=AuxRequest(lse=True))
    t = Trace.of(q, k, more.lse, out=out, mask=masks.causal())
    torch.testing.assert_close(t.weights() @ v, out)
    assert t.out.data_ptr() == out.data_ptr()


def test_attention_is_run_only_if_what_it_alone_tells_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = qkv()
    lse = regard.trace(q, k, v).lse
    runs = []
    observe = Tiled.observe
    monkeypatch.setattr(Tiled, "observe", lambda self, x: runs.append(1) or observe(self, x))
    t = Trace.of(q, k, lse, v=v, backend="tiled")
    one = t[0].detach().to("cpu")
    assert one.weights().shape == (1, H, N, N)
    assert one.received().shape == (1, H, N)
    assert not runs
    assert one.entropy.shape == (1, H, N)
    assert t.out.shape == (2, H, N, 5)
    assert t.max_logit.shape == (2, H, N)
    assert runs == [1]


def test_axes_are_those_of_the_inputs() -> None:
    q, k, v = draw(3, 2, 2, 6, D), draw(3, 2, 1, 6, D, seed=1), draw(3, 2, 1, 6, D, seed=2)
    own = regard.trace(q, k, v)
    torch.testing.assert_close(Trace.of(q, k, own.lse).received(), own.received())
    x = draw(6, D)
    assert Trace.of(x, x, regard.trace(x, x, x).lse).weights().shape == (6, 6)


def test_tokens_end_to_end() -> None:
    q, k = draw(12, H, D), draw(12, G, D, seed=1)
    ends = torch.tensor([0, 5, 12])
    own = regard.trace(q, k, k, mask=masks.causal(), cu_seqlens=ends)
    t = Trace.of(q, k, own.lse, v=k, mask=masks.causal(), cu_seqlens=ends)
    torch.testing.assert_close(t[1].weights(), own[1].weights())
    torch.testing.assert_close(t.entropy, own.entropy)
    torch.testing.assert_close(t.out, own.out)


def test_without_values_there_is_no_output(tmp_path: Path) -> None:
    q, k, v = qkv()
    own = regard.trace(q, k, v)
    t = Trace.of(q, k, own.lse)
    with pytest.raises(RegardError, match="was made without values"):
        _ = t.out
    torch.testing.assert_close(t.entropy, own.entropy)
    t.save(tmp_path / "given.regard")
    with regard.load(tmp_path / "given.regard") as file:
        torch.testing.assert_close(file.trace.weights(), own.weights())
    torch.testing.assert_close(copy.deepcopy(t).entropy, own.entropy)


def test_rows_that_see_nothing_may_be_told_by_either_infinity() -> None:
    q, k, v = qkv()
    mask = masks.padding(torch.tensor([N, 0]))
    own = regard.trace(q, k, v, mask=mask)
    lse = own.lse.masked_fill(own.lse == -math.inf, math.inf)
    t = Trace.of(q, k, lse, mask=mask)
    assert (t.weights()[1] == 0).all()
    torch.testing.assert_close(t.received(), own.received())


def test_gradients_flow_through_an_lse_of_the_graph_and_through_no_other() -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    own = regard.trace(q, k, v, mask=masks.causal())
    asks = draw(2, H, N, N, seed=9)
    expected = torch.autograd.grad((own.weights() * asks).sum(), [q, k])
    again = regard.trace(q, k, v, mask=masks.causal())
    t = Trace.of(q, k, again.lse, mask=masks.causal())
    for a, b in zip(torch.autograd.grad((t.weights() * asks).sum(), [q, k]), expected, strict=True):
        torch.testing.assert_close(a, b)
    cut = Trace.of(q, k, own.lse.detach(), v=v, mask=masks.causal())
    assert not any(x.requires_grad for x in (cut.weights(), cut.entropy, cut.out, cut.received()))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q, k, lse: (q, k, lse + 0.5), "lse is not that of"),
        (lambda q, k, lse: (q, k, lse / math.log(2)), r"lse \* math.log\(2\)"),
        (lambda q, k, lse: (q, k.roll(1, 2), lse), "lse is not that of"),
    ],
)
def test_an_lse_of_another_call_is_refused(change: Any, says: str) -> None:
    q, k, v = qkv()
    lse = regard.trace(q, k, v, mask=masks.causal()).lse
    with pytest.raises(RegardError, match=says):
        Trace.of(*change(q, k, lse), mask=masks.causal())


@pytest.mark.parametrize(
    ("lse", "says"),
    [
        (torch.zeros(2, N, H), r"float32 \[2, 23, 4\]"),
        (torch.zeros(2, H, N, dtype=torch.long), "int64"),
        (None, "NoneType"),
    ],
)
def test_an_lse_of_another_shape_or_kind_is_refused(lse: Any, says: str) -> None:
    q, k, _ = qkv()
    # Shapes in the signature of Trace.of are checked before it runs, where they are.
    options = dict.fromkeys(
        ("v", "out", "mask", "backend", "cu_seqlens", "score", "bias", "softcap", "sink", "scale")
    )
    with pytest.raises(RegardError, match=f"(?s)lse does not fit.*{says}"):
        given_trace(q, k, lse, verify=True, **options)


def test_another_mask_is_refused_unless_nobody_looks() -> None:
    q, k, v = qkv()
    lse = regard.trace(q, k, v).lse
    with pytest.raises(RegardError, match="with this mask"):
        Trace.of(q, k, lse, mask=masks.causal())
    Trace.of(q, k, lse, mask=masks.causal(), verify=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in qkv())
    own = regard.trace(q, k, v, mask=masks.causal())
    t = Trace.of(q, k, own.lse, mask=masks.causal())
    torch.testing.assert_close(t.weights(), own.weights())
    # As kernels of half precision may be off.
    Trace.of(q, k, own.lse.to(dtype) if dtype != torch.float16 else own.lse, mask=masks.causal())
