"""FlexAttention, seen as it is called.

`flex_attention` is a plain function, which a torch function mode does not see, and people hold it
in many ways: imported by name, wrapped by `torch.compile` before a model exists. What all of them
share is the function object, so while a model runs the code of that object is another: it shows
the call, and calls the function's own code. The compiler does not look into it; it compiles the own
code, as it would have, with the settings it was called with.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

from regard.calls import dispatch
from regard.calls.watchers import changed as changes
from regard.calls.watchers import learned, watched
from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.values import Shape
from regard.watching.flex.mask_mods import mask_of_blocks
from regard.watching.flex.score_mods import Changed, change_of
from regard.watching.graph_breaks import WHY, stepped_over, uncompiled
from regard.watching.whole_masks import EVERYTHING, both

_watching: list[FlexCalls] = []
_swapping = threading.Lock()


class FlexCalls:
    """While active, calls of flex_attention on this thread are traced, and so shown to who watches.

    Where nothing is differentiated the trace's output is used. Where gradients are wanted, or more
    than the output, or the compiled kernel, FlexAttention answers and the trace is made beside it.
    """

    def __init__(self, where: Callable[[], str], wanted: Callable[[str], bool]) -> None:
        self.where, self.wanted = where, wanted
        """Say which module is running, and whether it is to be looked at."""
        self.thread = threading.get_ident()
        self._read: dict[Any, Any] = {}
        """What functions were found to mean, held with them: layers share masks."""

    def __enter__(self) -> FlexCalls:
        with _swapping:
            _watching.append(self)
            _swap_in()
        return self

    def __exit__(self, *_: object) -> None:
        with _swapping:
            _watching[:] = [calls for calls in _watching if calls is not self]
            if not _watching:
                _swap_out()
        self._read.clear()

    # Disabled: a compiled model would compile what is done here along with itself.
    @uncompiled
    def look(self, call: _Call, *, compiled: bool) -> Tensor:
        """The output of a call, from its trace."""
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and learned()):
                return self._traced(call, compiled)
        except RegardError as error:
            where = self.where() or "(model)"
            raise RegardError(f"{where} calls flex_attention: {error}") from None

    def _traced(self, call: _Call, compiled: bool) -> Tensor:
        q, device = call.query, call.query.device
        B, H, Q, _ = q.shape
        shape = Shape(B, H, Q, call.key.shape[2])
        dtype = torch.promote_types(q.dtype, torch.float32)
        changed, mask = Changed(), None
        # What functions mean is read once for all runs, so it is in the graph of none.
        with torch.no_grad():
            if call.score_mod is not None:
                changed = self._once(call.score_mod, change_of, shape, device, dtype)
            if call.block_mask is not None:
                mask = self._once(call.block_mask, mask_of_blocks, shape, device, compiled=compiled)
        if changed.learned and torch.is_grad_enabled():
            raise RegardError(
                "what a score_mod learns gets no gradients from a trace",
                got="a score_mod that holds tensors with requires_grad, and gradients=True",
                do="leave the layer out with layers=, or write its attention with regard.attention",
            )
        seen = [m for m in (mask, changed.mask) if m is not None]
        scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
        k, v = (t.expand(B, *t.shape[1:]) for t in (call.key, call.value))
        trace = dispatch.trace(
            q, k, v, mask=_all(seen), bias=changed.bias, softcap=changed.softcap,
            scale=scale * changed.gain,
        )  # fmt: skip
        return trace.rows.out

    def _once(self, function: Any, read: Callable[..., Any], *given: Any, **how: Any) -> Any:
        key = (id(function), *given)
        if key not in self._read:
            self._read[key] = function, read(function, *given, **how)
        return self._read[key][1]


class _Call:
    """The arguments of flex_attention."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor] | None = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.score_mod, self.block_mask, self.scale = score_mod, block_mask, scale
        self.more = return_lse or return_aux is not None
        self.grouped = enable_gqa

    @property
    def only_its_output(self) -> bool:
        """Whether the output of a trace is all that is asked for. Anything odd is left to
        FlexAttention, which may refuse it."""
        learns = torch.is_grad_enabled() and (
            # What a score_mod holds may be learned.
            self.score_mod is not None
            or any(t.requires_grad for t in (self.query, self.key, self.value))
        )
        q, k, v = self.query.shape, self.key.shape, self.value.shape
        usual = (
            len(q) == len(k) == len(v) == 4
            and q[0] == k[0]
            and (self.grouped or q[1] == k[1])
            and self.query.dtype == self.key.dtype == self.value.dtype
            and _fits(self.block_mask, q[2], k[2])
        )
        return usual and not (learns or self.more)


def _fits(block_mask: Any, queries: int, keys: int) -> bool:
    return block_mask is None or tuple(block_mask.seq_lengths) == (queries, keys)


@stepped_over
def called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of flex_attention by anybody. Only FlexAttention may be compiled in here."""
    calls, call = _looked_at(args, kwargs)
    if calls is None or call is None:
        return own(*args, **kwargs)
    compiled = eval_frame.get_eval_frame_callback() not in (None, False)
    if _changes():
        if call.more:
            raise RegardError(
                "the output of this attention cannot be changed",
                got="flex_attention that is asked for its lse as well",
                do="leave the layer out with layers=",
            )
        return _laid_out(calls.look(call, compiled=compiled), call.query)
    if not compiled and call.only_its_output:
        return _laid_out(calls.look(call, compiled=compiled), call.query)
    answer = own(*args, **kwargs)
    calls.look(call, compiled=compiled)
    return answer


@uncompiled
def _changes() -> bool:
    return changes()


@uncompiled
def _looked_at(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[FlexCalls | None, _Call | None]:
    """Who looks at this call, the innermost first, and what it asks."""
    here = threading.get_ident()
    for calls in reversed(_watching):
        if watched() and calls.thread == here and calls.wanted(calls.where()):
            # FlexAttention refuses other arguments better.
            with contextlib.suppress(TypeError):
                return calls, _Call(*args, **kwargs)
            break
    return None, None


def _all(seen: list[Mask]) -> Mask | None:
    mask = EVERYTHING
    for part in seen:
        mask = both(mask, part)
    return None if mask == EVERYTHING else mask


@uncompiled
def _laid_out(out: Tensor, query: Tensor) -> Tensor:
    """The output in memory as FlexAttention leaves it: its axes in the order of the query's, so
    that a model that transposes it can view it as one."""
    steps = query.stride()
    order = [*sorted(range(3), key=lambda a: -steps[a]), 3]
    sorted_out = out.permute(order).contiguous()
    return sorted_out.permute([order.index(a) for a in range(4)])


def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


def _swap_in() -> None:
    global own
    function = _flex_attention()
    if function.__code__ is _stand_in.__code__:
        return
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    own = made
    function.__code__ = _stand_in.__code__
    function.__defaults__ = function.__kwdefaults__ = None
    # Says so where the compiler, told to leave nothing out, would have to look into it.
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, WHY


def _swap_out() -> None:
    function = _flex_attention()
    if own is None:
        return
    function.__code__ = own.__code__
    function.__defaults__, function.__kwdefaults__ = own.__defaults__, own.__kwdefaults__
    for name in ("_torchdynamo_disable", "_torchdynamo_disable_msg"):
        vars(function).pop(name, None)


own: Any = None
"""FlexAttention's own function, while the one that people hold is another."""

# It runs with the globals of PyTorch's module, so it must find its way back. (A lambda, because its
# code may have no free variables: decorators leave lambdas alone.)
_stand_in = lambda *args, **kwargs: __import__(  # noqa: E731
    "regard.watching.flex.calls", fromlist=["called"]
).called(args, kwargs)
stepped_over(_stand_in)
