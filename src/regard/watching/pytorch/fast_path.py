"""PyTorch's fast path: what its transformer modules do only where no function mode is on.

nn.MultiheadAttention takes nested tensors nowhere else, and nn.TransformerEncoder makes them there,
of a batch that is padded; what it gives for padding is 0 then. So that a watched model computes
what it computes unwatched, modes are off while such a module runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.watching.module_calls import compiled_in_place


class _Held(NamedTuple):
    path: str
    guard: Any


class FastPath:
    """Turns function modes off for modules that need it, and on again for those inside of them that
    do not. Of several watches one does it, the one that came first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held: list[_Held] = []
        self._nested: tuple[nn.MultiheadAttention, Tensor] | None = None

    def enter(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A module begins to run."""
        on = torch._C._is_torch_function_enabled()
        if isinstance(module, nn.TransformerEncoder):
            if on and _makes_nested(module, args, kwargs) and not self._compiled(path):
                self._hold(path, torch._C.DisableTorchFunction())
        elif isinstance(module, nn.MultiheadAttention):
            query = kwargs.get("query", args[0] if args else None)
            if isinstance(query, Tensor) and query.is_nested:
                # PyTorch refuses jagged ones in any case; other modules of this kind go their way.
                own = type(module).forward is nn.MultiheadAttention.forward
                if not own or query.layout != torch.strided:
                    return
                if on:
                    self._hold(path, torch._C.DisableTorchFunction())
                self._nested = (module, query) if self._held else None
            elif not on and self._held:
                self._hold(path, torch._C._EnableTorchFunction())

    def leave(self, path: str) -> tuple[nn.MultiheadAttention, Tensor] | None:
        """A module has run: what of it was not seen, the self-attention of nested tensors."""
        nested, self._nested = self._nested, None
        if self._held and self._held[-1].path == path:
            self._held.pop().guard.__exit__(None, None, None)
        return nested

    def end(self) -> None:
        while self._held:
            self._held.pop().guard.__exit__(None, None, None)
        self._nested = None

    def _compiled(self, path: str) -> bool:
        """Whether a module around this one is compiled: then it makes nothing nested, if it is new
        enough to ask. (If it is compiled itself, by its own `compile()`, the compiler leaves it
        alone.)"""
        if "is_compiling" not in nn.TransformerEncoder.forward.__code__.co_names:
            return False
        names = path.split(".") if path else []
        around = (self._model.get_submodule(".".join(names[:n])) for n in range(len(names)))
        return any("_orig_mod" in m._modules or compiled_in_place(m) for m in around)

    def _hold(self, path: str, guard: Any) -> None:
        guard.__enter__()
        self._held.append(_Held(path, guard))


def _makes_nested(
    module: nn.TransformerEncoder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether an encoder may make nested tensors of its input. It knows more reasons not to."""
    padding = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
    learns = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    return (
        padding is not None and bool(module.use_nested_tensor) and not (module.training or learns)
    )
