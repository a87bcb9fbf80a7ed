"""Traces that are kept stay what they were, whatever a model writes to its tensors afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard
from regard.backends.contract import Noted, Rows, Tabled
from regard.biases import dense
from regard.calls.watchers import gives_turned
from regard.watching.kept import tensors as kept_tensors
from regard.watching.kept.tensors import KeptTensors

MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


class StaticCache(nn.Module):
    """Decoding with keys, values and a mask that are written to in place, one token a call."""

    def __init__(self, places: int = 6) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.k, self.v = torch.zeros(2, 1, 2, places, 8)
        self.added = torch.zeros(1, 1, 1, places)

    def forward(self, x: Tensor, place: int) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        self.k, self.v = self.k.detach(), self.v.detach()
        self.k[:, :, place : place + 1], self.v[:, :, place : place + 1] = k, v
        self.added.fill_(-torch.inf)[..., : place + 1] = 0
        out = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=self.added)
        return out.transpose(1, 2).flatten(2)


class Reusing(nn.Module):
    """Writes to queries, keys, values and the output once it has attended."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.project, self.how = nn.Linear(16, 16), how

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.project(x).unflatten(-1, (2, 8)).transpose(1, 2) for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v)
        answer = out.clone()
        for tensor in (q, k, v, out):
            tensor.mul_(3)
        return answer


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_that_is_filled_in_place(mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, found = StaticCache(), []
    with mode(), regard.watch(model, keep="traces") as seen:
        for _ in range(2):  # two texts, the second over the first
            for place in range(3):
                model(torch.randn(1, 1, 16), place)
                trace = seen[""].traces[-1]
                found.append((trace.weights().detach().clone(), trace.out.detach().clone()))
    for trace, (weights, out) in zip(seen[""].traces, found, strict=True):
        torch.testing.assert_close(trace.weights(), weights)
        torch.testing.assert_close(trace.weights() @ trace.inputs.v, out)


class OwnMask(nn.Module):
    """Lets every layer see fewer keys, by writing to the one mask that all of them are given."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layers, self.bias = nn.ModuleList(Attends() for _ in range(3)), bias

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(5, 5) if self.bias else torch.ones(5, 5).bool()
        for place, layer in enumerate(self.layers):
            x = layer(x, mask)
            mask[:, place] = -3.0 if self.bias else False
        return x


class Attends(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("spilled", [False, True], ids=["in memory", "spilled"])
@pytest.mark.parametrize("bias", [False, True], ids=["mask", "bias"])
@pytest.mark.parametrize("mode", MODES)
def test_a_mask_that_is_first_written_to_after_it_was_seen(
    mode: Callable[[], Any], bias: bool, spilled: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 5, 8)
    spill = tmp_path / "seen.regard" if spilled else None
    model = OwnMask(bias)
    with mode(), regard.watch(model, keep="traces", spill=spill) as seen:
        model(x)
    hidden = torch.zeros(5)
    for place in range(3):
        logits = x @ x.mT / 8**0.5 + hidden
        trace = seen[f"layers.{place}"].trace
        torch.testing.assert_close(trace.weights(), logits.softmax(-1))
        x = logits.softmax(-1) @ x
        hidden[place] = -3.0 if bias else -torch.inf


@pytest.mark.parametrize("mode", MODES)
def test_tensors_that_are_used_again(mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, x = Reusing().requires_grad_(False), torch.randn(1, 5, 16)
    with mode(), regard.watch(model, keep="traces") as seen:
        answer = model(x)
    trace = seen[""].trace
    torch.testing.assert_close(trace.out, answer)
    torch.testing.assert_close(trace.weights() @ trace.inputs.v, answer)


def test_calls_share_the_copy_of_what_they_share() -> None:
    kept = KeptTensors()
    k = torch.randn(1, 1, 7, 8)
    traces = [regard.trace(torch.randn(1, 4, n, 8), k, k) for n in (1, 2)]
    with torch.no_grad():
        one, two = (kept.lasting(trace).inputs for trace in traces)
    assert one.k is one.v is two.k is two.v
    assert one.k.data_ptr() != k.data_ptr()
    k[..., 0] = 0
    with torch.no_grad():
        other = kept.lasting(regard.trace(torch.randn(1, 4, 1, 8), k, k)).inputs
    assert torch.equal(other.k, k)
    assert not torch.equal(one.k, k)


def test_other_queries_have_a_bound_of_their_own() -> None:
    """What was worked out of the tensors of a call is not that of others."""
    x = regard.trace(*torch.randn(3, 1, 2, 5, 8)).inputs
    bound = x.largest_sum
    assert x.with_qkv(4 * x.q, x.k, x.v).largest_sum == pytest.approx(4 * bound)


def test_an_output_beside_a_table_of_statistics() -> None:
    """As kernels write them."""
    trace = regard.trace(*torch.randn(3, 1, 2, 5, 8))
    out, lse, max_logit, entropy = (t.clone() for t in trace.rows)
    rows = Tabled(trace.rows.out, torch.stack([max_logit, entropy, lse]))
    kept = KeptTensors().lasting(replace(trace, rows=rows))
    trace.rows.out.zero_()
    assert torch.equal(kept.out, out)
    assert torch.equal(kept.lse, lse)
    assert torch.equal(kept.max_logit, max_logit)
    assert torch.equal(kept.entropy, entropy)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_copied_twice(mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where a mask holds tensors, which are looked at too."""
    with mode():
        q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        trace = regard.trace(q, k, v, mask=regard.masks.keep(torch.rand(5, 5) < 0.5))
        copied: list[Tensor] = []
        copy = kept_tensors._copy
        monkeypatch.setattr(kept_tensors, "_copy", lambda t: copied.append(t) or copy(t))
        KeptTensors().lasting(trace)
    assert len([t for t in copied if t.is_floating_point()]) == len(("q", "k", "v", "output"))


def test_one_tensor_for_all_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Tensor] = []
    copy = kept_tensors._copy
    monkeypatch.setattr(kept_tensors, "_copy", lambda t: copied.append(t) or copy(t))
    x = torch.randn(1, 2, 5, 8)
    trace = regard.trace(x, x, x)
    kept = KeptTensors().lasting(trace).inputs
    assert len(copied) == len(("x", "output"))
    assert kept.q is kept.k is kept.v
    assert kept.q.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("like_queries", [False, True])
def test_an_output_that_the_model_turns(like_queries: bool) -> None:
    """Transformers turns an output to [B, Q, H, E]. Where a kernel has written it so already, the
    model is given that very memory."""
    with torch.no_grad():
        trace = regard.trace(*torch.randn(3, 1, 2, 5, 8))
    out = trace.rows.out
    if like_queries:
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    trace, want = replace(trace, rows=Rows(out, *trace.rows[1:])), out.clone()
    before = gives_turned.set(True)
    try:
        kept = KeptTensors().lasting(trace)
    finally:
        gives_turned.reset(before)
    out.transpose(1, 2).contiguous().zero_()
    assert torch.equal(kept.out, want)
    assert (kept.out.data_ptr() == out.data_ptr()) == (not like_queries)


def test_a_table_after_a_mask_of_numbers() -> None:
    kept, qkv = KeptTensors(), torch.randn(3, 1, 2, 5, 8)
    table = torch.rand(5, 5) < 0.5
    before = table.clone()
    for mask in (regard.masks.causal(), regard.masks.keep(table)):
        trace = kept.lasting(regard.trace(*qkv, mask=mask))
    table.logical_not_()
    assert trace.mask is not None
    assert torch.equal(trace.mask.tensors()[0].reshape(5, 5), before)


def test_the_first_keys_logit_goes_with_a_copy() -> None:
    trace = regard.trace(*torch.randn(3, 1, 2, 5, 8))
    noted = Noted(*trace.rows)
    noted.first = torch.randn(1, 2, 5)
    rows = KeptTensors().lasting(replace(trace, rows=noted)).rows
    assert isinstance(rows, Noted)
    assert rows.first is noted.first
    assert rows.out is not noted.out


@pytest.mark.parametrize("dtype", kept_tensors._COPIED_AT_ONCE)
def test_times_one_is_a_copy(dtype: torch.dtype) -> None:
    """As copies of several tensors are made on a card."""
    info = torch.finfo(dtype)
    odd = [0.0, -0.0, torch.inf, -torch.inf, info.max, info.tiny, -info.tiny, info.smallest_normal]
    x = torch.tensor([*odd, info.tiny * info.eps * 2, 1 + info.eps], dtype=dtype)
    tensors = [x, torch.randn(2, 5, 3, dtype=dtype).transpose(0, 1)]
    for copy, t in zip(torch._foreach_mul(tensors, 1), tensors, strict=True):
        assert copy.data_ptr() != t.data_ptr()
        assert torch.equal(copy, t)
        assert torch.equal(copy.signbit(), t.signbit())
    assert torch._foreach_mul([torch.tensor([torch.nan], dtype=dtype)], 1)[0].isnan()


def test_what_is_repeated_is_held_once() -> None:
    k = torch.randn(1, 1, 7, 8).expand(3, 4, 7, 8)
    with torch.no_grad():
        x = KeptTensors().lasting(regard.trace(torch.randn(3, 4, 2, 8), k, k)).inputs
    assert torch.equal(x.k, k)
    assert x.k.untyped_storage().nbytes() == 7 * 8 * 4


def test_in_training_nothing_is_copied_that_nobody_wrote_to() -> None:
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    trace = regard.trace(q, q, q).detach()
    kept = KeptTensors().lasting(trace, held=True)
    assert kept.inputs.q.data_ptr() == q.data_ptr()
    assert kept.out.data_ptr() == trace.out.data_ptr()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("heads", "tokens"), [(2, 5), (2, 1), (1, 5)])
def test_outputs_that_a_model_of_transformers_writes_to(
    heads: int, tokens: int, mode: Callable[[], Any]
) -> None:
    """Turned to the model's order of axes an output is a copy, unless one of them has length 1."""
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=heads, num_key_value_heads=heads,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaModel._from_config(config, attn_implementation="sdpa").eval()
    before: list[Tensor] = []

    def overwrite(module: nn.Module, given: tuple[Tensor]) -> None:
        before.append(given[0].detach().clone())
        given[0].detach().mul_(3)

    model.layers[0].self_attn.o_proj.register_forward_pre_hook(overwrite)
    with mode(), regard.watch(model, keep="traces") as seen:
        for _ in range(3):
            model(torch.arange(tokens)[None])
    kept = seen["layers.0.self_attn"].traces
    for trace, given in zip(kept, before, strict=True):
        assert torch.equal(trace.out.transpose(1, 2).flatten(2), given)


class Biased(nn.Module):
    """Learns what is added to its logits, and adds what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.bias = nn.Parameter(torch.randn(1, 2, 5, 5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return regard.attention(q, k, v, bias=dense(self.bias))


@pytest.mark.parametrize("gradients", [False, True])
def test_a_bias_that_an_optimiser_changes_after_the_call(gradients: bool) -> None:
    torch.manual_seed(0)
    model, x = Biased(), torch.randn(1, 2, 5, 8)
    optimiser = torch.optim.SGD(model.parameters(), lr=50.0)
    for _ in range(3):
        with regard.watch(model, keep="traces", gradients=gradients) as seen:
            model(x).square().sum().backward()
            trace = seen[""].trace
            weights = trace.weights().detach().clone()
            optimiser.step()
            torch.testing.assert_close(trace.weights(), weights)
        assert not torch.allclose(regard.trace(*[x] * 3, bias=dense(model.bias)).weights(), weights)
        torch.testing.assert_close(seen[""].first, weights[..., 0].mean((0, -1)))


def test_a_loss_on_weights_still_reaches_a_bias() -> None:
    model = Biased()
    with regard.watch(model, keep="traces", gradients=True) as seen:
        model(torch.randn(1, 2, 5, 8))
    seen[""].trace.weights()[..., 0].sum().backward()
    assert model.bias.grad is not None
    assert model.bias.grad.abs().sum() > 0
