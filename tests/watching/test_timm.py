"""Models of timm: what is seen of them are the weights that they compute by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import RegardError

timm = pytest.importorskip("timm", reason="timm is not installed: pip install timm")

SIZES: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2}
PYRAMID: dict[str, Any] = {
    "img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4
}  # fmt: skip
MODELS = {
    "vit_tiny_patch16_224": SIZES | {"num_heads": 2},
    # A bias of relative positions; windows that are shifted, with masks; an axis of log-distances.
    "beit_base_patch16_224": SIZES | {"num_heads": 2},
    "swin_tiny_patch4_window7_224": PYRAMID,
    "swinv2_tiny_window8_256": PYRAMID,
    "vit_relpos_small_patch16_224": SIZES | {"num_heads": 2},
}


def build(name: str, sizes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=3, **sizes)
    for module in model.modules():
        if hasattr(module, "relative_position_bias_table"):
            # Zero at the start, and a bias of zeros says nothing.
            nn.init.normal_(module.relative_position_bias_table)
    return model.eval()


def weights_by_hand(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What comes out of each softmax when no layer calls a fused function."""
    found: list[Tensor] = []
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
        if isinstance(getattr(module, "attn_drop", None), nn.Module):
            module.attn_drop.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    model(x)
    return found


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_weights_are_those_that_the_model_computes_by_hand(name: str) -> None:
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    model = build(name, MODELS[name])
    plain = model(x)
    with regard.watch(model, keep="traces") as seen:
        watched = model(x)
    torch.testing.assert_close(watched, plain, atol=1e-6, rtol=1e-5)
    expected = weights_by_hand(model, x)
    assert len(seen) == len(expected) == (2 if "depth" in MODELS[name] else 4)
    for layer, weights in zip(seen.values(), expected, strict=True):
        torch.testing.assert_close(layer.trace.weights(), weights, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_heads_that_are_mixed_are_named() -> None:
    model = build("cait_xxs24_224", SIZES | {"num_heads": 2})
    said = r"blocks\.0\.attn .*cait\.py:\d+: linear changes"
    with pytest.raises(RegardError, match=said), regard.watch(model):
        model(torch.randn(1, 3, 32, 32))
