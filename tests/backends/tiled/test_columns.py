"""Keys and values as columns: copied where a product with a transposed view is slow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.backends.tiled import backward, columns, tiles


@pytest.mark.parametrize("on_arm", [False, True])
def test_they_are_copied_where_views_are_slow(
    on_arm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "ON_ARM", on_arm)
    t = torch.randn(2, 3, 5, 4)
    assert torch.equal(columns.columns(t, 16), t.mT)
    assert columns.columns(t, 16).is_contiguous() == on_arm
    assert not columns.columns(t, 15).is_contiguous(), "a few rows are multiplied by others"
    assert not columns.columns(t.double(), 16).is_contiguous(), "only products of float32 are slow"


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("on_arm", [False, True])
def test_products_of_a_call_and_its_gradients_take_them(
    on_arm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "ON_ARM", on_arm)
    taken: dict[str, list[Tensor]] = {"tiles": [], "backward": []}

    def put(name: str) -> None:
        def noted(t: Tensor, rows: int) -> Tensor:
            assert rows == 33
            taken[name].append(columns.columns(t, rows))
            return taken[name][-1]

        monkeypatch.setattr({"tiles": tiles, "backward": backward}[name], "columns", noted)

    for name in taken:
        put(name)
    q, k, v = torch.randn(3, 2, 4, 33, 8, generator=torch.Generator().manual_seed(0))
    bias = biases.alibi([0.5, 0.25, 0.125, 0.0625])
    found = {}
    for backend in ("tiled", "reference"):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = regard.attention(*inputs, mask=masks.causal(), bias=bias, backend=backend)
        found[backend] = (out, *torch.autograd.grad(out.square().sum(), inputs))
    torch.testing.assert_close(found["tiled"], found["reference"])
    for made in taken.values():
        assert made
        assert all(t.is_contiguous() == on_arm for t in made)
