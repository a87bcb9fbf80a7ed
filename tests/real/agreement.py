"""What a trained model did, held to what PyTorch and transformers hand out themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def agree(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Held to a run in float64: as near to it as the plain run in float32 is, within a factor."""
    assert got.shape == plain.shape == exact.shape
    error, usual = (float((t.double() - exact).abs().max()) for t in (got, plain))
    assert error <= 4 * usual + 1e-7, (
        f"off by {error:.2g}, where plain arithmetic is by {usual:.2g}"
    )


def torch_weights(model: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
    """The weights of every nn.MultiheadAttention, by path, as PyTorch gives them if it is asked."""
    called: dict[str, tuple[Any, Any]] = {}
    modules = {
        path: part
        for path, part in model.named_modules()
        if isinstance(part, nn.MultiheadAttention)
    }

    def note(path: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, given: Any) -> None:
            called[path] = args, given

        return hook

    hooks = [
        part.register_forward_pre_hook(note(path), with_kwargs=True)
        for path, part in modules.items()
    ]
    # With gradients on, PyTorch takes no short cut past its modules.
    with torch.enable_grad():
        run()
    for hook in hooks:
        hook.remove()
    asked = {"need_weights": True, "average_attn_weights": False}
    with torch.no_grad():
        return {
            path: modules[path](*args, **given | asked)[1] for path, (args, given) in called.items()
        }
