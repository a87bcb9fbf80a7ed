"""regard's attention in the processors of diffusers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.between_graphs import inlined
from regard.calls import dispatch
from regard.calls.sdpa_arguments import four_axes, mask_and_bias
from regard.errors import RegardError
from regard.traces import Trace

_pytorch: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention


class AttentionProcessor:
    """An attention processor of diffusers that does what another one does, with regard's attention.

    Processors know how a family projects, normalises and rotates; `own` is the one that a layer has
    and still does that. Where it calls PyTorch's attention, regard's is computed. `see` is shown
    the trace of each call; without it none is made.

    A model gets one for each of its layers by `attention_processors`.

    >>> import torch
    >>> class Plain:                               # as diffusers writes them
    ...     def __call__(self, attn, hidden_states):
    ...         return torch.nn.functional.scaled_dot_product_attention(*[hidden_states] * 3)
    >>> x, traces = torch.randn(1, 2, 5, 8), []
    >>> out = AttentionProcessor(Plain(), see=traces.append)(None, x)
    >>> torch.allclose(out, Plain()(None, x), atol=1e-6), traces[0].weights().shape
    (True, torch.Size([1, 2, 5, 5]))
    """

    own: Any
    see: Callable[[Trace], object] | None

    def __reduce__(self) -> Any:
        # Their classes are made here, by the kind of processor, and have no name elsewhere.
        return AttentionProcessor, (self.own, self.see)

    def __init__(self, own: Any, see: Callable[[Trace], object] | None = None) -> None:
        if isinstance(own, nn.Module):
            raise RegardError(
                "a processor that has weights stays where it is",
                got=type(own).__name__,
                accepted="processors of diffusers that hold no parameters",
                do="leave it in its layer: regard.watch and interpret.grounding see it there",
            )
        if isinstance(own, AttentionProcessor):
            own = own.own
        vars(self)["own"] = own
        vars(self)["see"] = see
        self.__class__ = _called_like(type(own))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attending = _Attending(self.see)
        with attending:
            out = self.own(*args, **kwargs)
        if not attending.calls:
            raise RegardError(
                "a processor did not call PyTorch's attention, so that regard's could not take its "
                "place",
                got=type(self.own).__name__,
                accepted="processors that call scaled_dot_product_attention, as by the backend "
                '"native" of diffusers',
                do='model.set_attention_backend("native"), or AttnProcessor2_0() for one that '
                "computes attention by hand; or give this layer its own processor again",
            )
        return out

    def __getattr__(self, name: str) -> Any:
        # What diffusers keeps on a processor (its backend, a scale) is its own's.
        if name == "own":
            raise AttributeError(name)
        return getattr(self.own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("own", "see"):
            vars(self)[name] = value
        elif name == "__class__":
            super().__setattr__(name, value)
        else:
            setattr(self.own, name, value)

    def __repr__(self) -> str:
        return f"AttentionProcessor({type(self.own).__name__})"


def attention_processors(
    model: nn.Module, see: Callable[[str, Trace], object] | None = None
) -> dict[str, AttentionProcessor]:
    """An `AttentionProcessor` for each layer of a model of diffusers, by the layer's path, as
    `set_attn_processor` takes them; `see` is shown the path and the trace of each call.

        own = unet.attn_processors
        unet.set_attn_processor(regard.nn.attention_processors(unet))
        ...
        unet.set_attn_processor(own)                         # as it was

    Models that have no `set_attn_processor` (the first DiT, Mochi, Lumina 2) take them layer by
    layer: `model.get_submodule(path.removesuffix(".processor")).set_processor(processor)`.
    """
    found = getattr(model, "attn_processors", None)
    if not isinstance(found, dict):
        found = {
            f"{path}.processor": layer.processor
            for path, layer in model.named_modules()
            if hasattr(layer, "set_processor") and hasattr(layer, "processor")
        }
    if not found:
        raise RegardError(
            "this model has no attention processors",
            got=type(model).__name__,
            accepted="a model of diffusers: pipe.unet, pipe.transformer",
            do="use regard.watch for others, or regard.nn.replace_attention",
        )
    made = {}
    for name, own in found.items():
        path = name.removesuffix(".processor")
        made[name] = AttentionProcessor(own, None if see is None else functools.partial(see, path))
    return made


_kinds: dict[type, type[AttentionProcessor]] = {}


def _called_like(kind: type) -> type[AttentionProcessor]:
    """The class of those that take what processors of this kind take: diffusers reads it from the
    signature of `__call__`."""
    if kind in _kinds:
        return _kinds[kind]

    def __call__(self: AttentionProcessor, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return AttentionProcessor.__call__(self, *args, **kwargs)

    __call__.__signature__ = inspect.signature(kind.__call__)  # type: ignore[attr-defined]
    _kinds[kind] = type("AttentionProcessor", (AttentionProcessor,), {"__call__": __call__})
    return _kinds[kind]


class _Attending(TorchFunctionMode):
    """While active, calls of PyTorch's attention are calls of regard's."""

    def __init__(self, see: Callable[[Trace], object] | None) -> None:
        super().__init__()
        self.see, self.calls = see, 0

    # By itself the compiler could not know where it is called from.
    @inlined
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not _pytorch:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        mask, bias = mask_and_bias(attn_mask, is_causal)
        how: dict[str, Any] = {
            "mask": mask, "bias": bias, "scale": scale, "dropout": dropout_p,
            "training": dropout_p > 0,
        }  # fmt: skip
        q, k, v = map(four_axes, (query, key, value))
        if self.see is None:
            out = dispatch.attention(q, k, v, **how)
        else:
            trace = dispatch.trace(q, k, v, **how)
            self.see(trace)
            out = trace.out
        return out.reshape(*query.shape[:-1], out.shape[-1])
