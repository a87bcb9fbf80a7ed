"""PyTorch's own attention functions, seen as they are called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F  # noqa: N812
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from regard.calls import dispatch
from regard.calls.sdpa_arguments import four_axes, mask_and_bias
from regard.calls.watchers import WatchingMode, changed, watched
from regard.errors import RegardError
from regard.traces import Trace
from regard.watching.by_hand import FOLDS, STEPS, HandWritten, keeps_apart
from regard.watching.flex import FlexCalls
from regard.watching.graph_breaks import inlined, uncompiled
from regard.watching.pytorch.deferred_calls import DeferredCall, DeferredCalls
from regard.watching.pytorch.looking import Alone, Beside, looking
from regard.watching.pytorch.nested import Padded
from regard.watching.pytorch.split_sequences import (
    held_here,
    split_along_the_sequence,
    spread,
)


class AttentionMode(WatchingMode):
    """While active, calls of PyTorch's attention are traced, and so shown to who watches.

    Where nothing is differentiated the trace's output is used, so the work is done once. Where
    gradients are wanted, or dropout draws random numbers, PyTorch's own call gives the output and
    the trace is made beside it: gradients, checkpointing and random numbers stay as they were.
    Where outputs are changed, the trace's is used in any case.

    `leave` is told why a call cannot be traced: PyTorch then answers as if nobody watched.

    With `beside` every output is that of PyTorch's own call, to the last bit. It is asked about
    each call by its numbers of queries and keys; those that it wants are traced, the others not.
    """

    def __init__(
        self,
        where: Callable[[], str],
        wanted: Callable[[str], bool],
        by_hand: HandWritten,
        leave: Callable[[str], None],
        beside: Callable[[int, int], bool] | None = None,
    ) -> None:
        super().__init__()
        self._from_beside, self._where = beside, where
        self._flex = FlexCalls(where, wanted)
        self._by_hand, self._leave = by_hand, leave
        self.followed = by_hand.followed
        """The tensors that are followed through attention by hand, by identity."""
        self.on = False
        """Whether it is there, be it paused."""
        self.spared: Callable[[], AbstractContextManager[None]] = nullcontext
        """What looking is done in: an observer keeps its errors from the model there."""
        self.deferred: DeferredCalls | None = None
        """Calls that may wait until the forward pass is over, if the watcher lets them."""
        self._inside: Trace | None = None

    def __enter__(self) -> AttentionMode:
        looking.set(False)
        self.on = True
        self._flex.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *_: Any) -> None:
        """Off, if it was on: an interrupt may have come while it was turned on."""
        self.on = False
        self.pause()
        self._by_hand.begin()
        self._flex.__exit__()
        looking.set(False)

    def pause(self) -> None:
        """PyTorch asks about nothing, until `go_on`: what runs is known not to attend by it."""
        above: list[TorchFunctionMode] = []
        if self._on():
            while (mode := _pop_mode()) is not self:
                above.append(mode)
            for mode in reversed(above):
                _push_mode(mode)

    def go_on(self) -> None:
        if not self._on():
            _push_mode(self)

    def _on(self) -> bool:
        return any(mode is self for mode in _get_current_function_mode_stack())

    @inlined
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # The compiler has nothing to ask: what it makes of functions in between is not seen.
        if func not in _ASKED and (is_dynamo_compiling() or not self.followed):
            return func(*args, **kwargs)
        if func is _pytorch:
            return self.attend(*args, **kwargs)
        if func is _multi_head_forward:
            return self._multi_head(*args, **kwargs)
        if func in STEPS:
            return self._step(func, args, kwargs)
        if not is_dynamo_compiling():
            if not self.followed:
                return self._fold(func, args, kwargs)
            if self._by_hand.follows(func, args, kwargs):
                return self._step(func, args, kwargs)
        return func(*args, **kwargs)

    # Disabled, like the others below: the compiler would put PyTorch's functions into its graph as
    # they are, and what is done here with them.
    @uncompiled
    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """What F.scaled_dot_product_attention gives, and its trace."""
        return _pytorch(*args, **kwargs) if looking.get() else self._look(*args, **kwargs)

    def _look(
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
        def answered() -> Tensor:
            return _pytorch(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip

        if not watched():
            return answered()
        with Alone():
            if query.is_meta:
                self._leave("tensors on the meta device, which have no numbers")
                return answered()
            if changed():
                return self._changed(query, key, value, attn_mask, dropout_p, is_causal, scale)
            if query.is_nested or key.is_nested or value.is_nested:
                out = answered()
                with self.spared():
                    self._nested(query, key, value, attn_mask, is_causal, scale)
                return out
            if spread(query) or spread(key) or spread(value):
                split = split_along_the_sequence(query, key, value)
                if split is not None:
                    self._leave(split)
                    return answered()
                out = answered()
                with self.spared():
                    self._spread(query, key, value, attn_mask, is_causal, scale)
                return out
            asked = self._from_beside
            if asked is not None and not asked(query.shape[-2], key.shape[-2]):
                return answered()
            beside = asked is not None or dropout_p > 0
            if beside or (torch.is_grad_enabled() and _learns(query, key, value, attn_mask)):
                out = answered()
                later = None if attn_mask is not None else self.deferred
                if later is not None and later.take(
                    self._where(), query, key, value, is_causal, scale
                ):
                    return out
                with Beside(), self.spared():
                    _traced(query, key, value, attn_mask, is_causal, scale)
                return out
            with self.spared():
                out = _traced(query, key, value, attn_mask, is_causal, scale).rows.out
                return out.reshape(*query.shape[:-1], out.shape[-1])
            return answered()

    def look_at(self, call: DeferredCall) -> None:
        """Trace a call that waited."""
        with Alone(), Beside(), self.spared(), call.as_it_was_made():
            _traced(call.query, call.key, call.value, None, call.causal, call.scale)

    def _changed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        """What those who change outputs make of a call."""
        split = split_along_the_sequence(query, key, value)
        if split is None and any(map(spread, (query, key, value))):
            split = "DTensors, of which this rank holds a part"
        if split is not None or any(t.is_nested for t in (query, key, value)):
            refuse_change(split or "nested tensors", "run the model on dense tensors")
        if dropout_p:
            refuse_change(f"attention with dropout_p={dropout_p:g}", "call model.eval() first")
        self._inside = _traced(query, key, value, attn_mask, is_causal, scale)
        out = self._inside.rows.out
        return out.reshape(*query.shape[:-1], out.shape[-1])

    def _spread(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> None:
        """Trace what this rank holds of heads and sequences that ranks share."""
        held = held_here(query, key, value, attn_mask)
        if isinstance(held, str):
            self._leave(held)
            return
        asked = self._from_beside
        q, k, v, mask = held
        assert q is not None
        assert k is not None
        assert v is not None
        if asked is None or asked(q.shape[-2], k.shape[-2]):
            with Beside():
                _traced(q, k, v, mask, is_causal, scale)

    def _nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> None:
        """Trace sequences of several lengths, padded to the longest."""
        padded = Padded.of(query, key, value)
        if padded is None or attn_mask is not None or (is_causal and not padded.square):
            self._leave("nested tensors of other lengths for queries than for keys, or with a mask")
            return
        padded.trace(is_causal=is_causal, scale=scale)

    @uncompiled
    def nested_multi_head(self, module: nn.MultiheadAttention, query: Tensor) -> None:
        """Trace self-attention of nested tensors, which nn.MultiheadAttention gives to one kernel
        together with its projections."""
        if changed():
            refuse_change(
                "nested tensors in nn.MultiheadAttention",
                "give nn.TransformerEncoder no padding, or enable_nested_tensor=False",
            )
        with Alone(), torch.no_grad(), self.spared():
            weight, bias = module.in_proj_weight, module.in_proj_bias
            sizes = (3, module.num_heads, module.head_dim)
            projected = (F.linear(x, weight, bias) for x in query.detach().unbind())
            parts = [t.unflatten(-1, sizes).permute(1, 2, 0, 3).unbind() for t in projected]
            q, k, v = zip(*parts, strict=True)
            Padded.of_lists(q, k, v).trace()

    @uncompiled
    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """nn.MultiheadAttention looks its function up where it is defined: it finds this one."""
        if looking.get():
            return _multi_head_forward(*args, **kwargs)
        named = dict(zip(_MULTI_HEAD, args, strict=False)) | kwargs
        with Alone():
            looked_at = self._looking_inside()
            if not named.get("need_weights", True):
                return looked_at(**named)
            if changed():
                out, _ = looked_at(**named | {"need_weights": False})
                return out, self._weights_inside(named)
            # With weights asked for it builds n×n and calls nothing that could be seen: it is
            # asked once more without.
            with Beside(), self.spared():
                looked_at(**named | {"need_weights": False, "dropout_p": 0.0})
            return _multi_head_forward(**named)

    def _weights_inside(self, named: dict[str, Any]) -> Tensor:
        """The weights that nn.MultiheadAttention was asked for, of the call that it just made."""
        assert self._inside is not None
        trace, self._inside = self._inside, None
        weights = trace.weights().to(named["query"].dtype)
        weights = weights.mean(1) if named.get("average_attn_weights", True) else weights
        return weights if named["query"].ndim == 3 else weights.squeeze(0)

    @uncompiled
    def _step(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._stepped(func, args, kwargs, func(*args, **kwargs))

    @uncompiled
    def _fold(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One of FOLDS, while nothing is followed. Most of them cut the last axis into heads, or
        lay heads side by side: then there is nothing to follow afterwards either."""
        out = func(*args, **kwargs)
        if args and _is_dense(args[0]) and _is_dense(out) and keeps_apart(args[0], out):
            return out
        return self._stepped(func, args, kwargs, out)

    def _stepped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        if not looking.get():
            with Alone(), self.spared():
                return self._by_hand.step(func, args, kwargs, out, self._from_beside)
        return out

    def _looking_inside(self) -> Any:
        """nn.MultiheadAttention's function, which finds our attention where it looks for
        PyTorch's. Others, in other threads, find PyTorch's."""
        finds = {**_multi_head_forward.__globals__, "has_torch_function": _no_more_asking}
        finds["scaled_dot_product_attention"] = self._look
        function = FunctionType(
            _multi_head_forward.__code__, finds, "multi_head", _multi_head_forward.__defaults__
        )
        function.__kwdefaults__ = _multi_head_forward.__kwdefaults__
        return function


def refuse_change(got: str, do: str) -> NoReturn:
    """Say that the output of a call cannot be put in the place of PyTorch's."""
    raise RegardError("the output of this attention cannot be changed", got=got, do=do)


def _no_more_asking(*_: object) -> bool:
    return False


def replaced() -> str | None:
    """Who put another function in the place of F.scaled_dot_product_attention, if anybody did."""
    found: Any = F.scaled_dot_product_attention
    if found is _pytorch:
        return None
    return f"{getattr(found, '__module__', '?')}.{getattr(found, '__qualname__', found)}"


_pytorch: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
"""PyTorch's own, also where somebody replaced it before this was imported."""
_multi_head_forward = F.multi_head_attention_forward
_ASKED = frozenset({_pytorch, _multi_head_forward}) | STEPS | FOLDS
"""The functions that are looked at whatever they are called with."""
_OWN = (Tensor, nn.Parameter)
_MULTI_HEAD = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias",
    "bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias",
    "training", "key_padding_mask", "need_weights", "attn_mask", "use_separate_proj_weight",
    "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v",
    "average_attn_weights", "is_causal",
)  # fmt: skip


def _is_dense(t: Any) -> bool:
    return type(t) in _OWN and not t.is_nested


def _learns(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    return (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
    )


def _traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Trace:
    """The trace of a call that is made in PyTorch's conventions."""
    q, k, v = map(four_axes, (query, key, value))
    mask, bias = mask_and_bias(attn_mask, is_causal)
    return dispatch.trace(q, k, v, mask=mask, bias=bias, scale=scale)
