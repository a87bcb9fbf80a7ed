"""A model that is watched for several passes, on the device the suite is run for: launches that are
made again write all statistics of a call to one tensor, which are added up together."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import regard
from regard.seen import Layer
from tests.parity import cases

LAYERS, WIDTH = 3, 64
PASSES = 4
CALLS = {"causal": (77, False), "one text after another": (77, True), "a step": (1, False)}


class Attending(nn.Module):
    """Two heads of keys for four of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4 * WIDTH, 8 * WIDTH)

    def forward(self, x: Tensor, cache: Tensor | None) -> Tensor:
        parts = self.project(x).unflatten(-1, (8, WIDTH)).transpose(1, 2).split((4, 2, 2), 1)
        q, k, v = parts
        if cache is not None:
            k, v = torch.cat([cache, k], 2), torch.cat([cache, v], 2)
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=q.shape[2] == k.shape[2], enable_gqa=True
        )
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attending() for _ in range(LAYERS))

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, cache)
        return x


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("keep", ["statistics", "traces"])
@pytest.mark.parametrize("call", CALLS)
def test_what_is_added_up_over_passes(
    call: str, keep: Literal["statistics", "traces"], learns: bool
) -> None:
    n, several = CALLS[call]
    device = torch.device(cases.DEVICE)
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = Model().to(device, dtype)
    texts = [torch.randn(2, n, 4 * WIDTH, device=device, dtype=dtype) for _ in range(PASSES)]
    cache = torch.randn(2, 2, 50, WIDTH, device=device, dtype=dtype) if n == 1 else None
    if several:
        texts = [text[:, : n - 16 * i] for i, text in enumerate(texts)]
    calls: list[tuple[Tensor, ...]] = []
    with torch.set_grad_enabled(learns):
        attend = functional.scaled_dot_product_attention
        with regard.watch(model, keep=keep) as seen:
            outputs = [model(text, cache) for text in texts]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(functional, "scaled_dot_product_attention", _noting(attend, calls))
            plain = [model(text, cache) for text in texts]
    # Two roundings of the same, layer upon layer.
    near = 1e-5 if dtype == torch.float32 else 0.02
    for found, wanted in zip(outputs, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=near, atol=near)
    layers = list(seen.values())
    assert len(layers) == LAYERS
    for i, layer in enumerate(layers):
        _agree(layer, calls[i::LAYERS], causal=n > 1)
        if keep == "traces":
            for (_, _, v, out), trace in zip(calls[i::LAYERS], layer.traces, strict=True):
                torch.testing.assert_close(trace.out, out, rtol=near, atol=near)
                torch.testing.assert_close(trace.inputs.v, v, rtol=near, atol=near)


def _noting(attend: object, calls: list[tuple[Tensor, ...]]) -> object:
    def noted(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Tensor:
        out = attend(q, k, v, **how)  # type: ignore[operator]
        calls.append(tuple(t.detach().clone() for t in (q, k, v, out)))
        return out  # type: ignore[no-any-return]

    return noted


def _agree(layer: Layer, calls: list[tuple[Tensor, ...]], *, causal: bool) -> None:
    """What a layer tells, beside the same by the formulas in float64."""
    entropies, firsts, largest = [], [], []
    for q, k, _, _ in calls:
        logits = q.double() @ k.double().repeat_interleave(2, 1).mT / WIDTH**0.5
        if causal:
            hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            logits = logits.masked_fill(hidden, -torch.inf)
        weights = logits.softmax(-1)
        entropies.append(torch.special.entr(weights).sum(-1).transpose(0, 1).flatten(1))
        firsts.append(weights[..., 0].transpose(0, 1).flatten(1))
        largest.append(logits.amax((0, 2, 3)))
    wanted = {
        "entropy": torch.cat(entropies, 1).mean(1),
        "first": torch.cat(firsts, 1).mean(1),
        "max_logit": torch.stack(largest).amax(0),
    }
    for name, value in wanted.items():
        found = getattr(layer, name).double()
        value = value.to(found.device)
        assert torch.allclose(found, value, rtol=2e-4, atol=2e-5), f"{name}: {found} {value}"
