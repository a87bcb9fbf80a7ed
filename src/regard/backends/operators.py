"""A backend's passes as operators of torch.library, so that torch.compile and torch.export see one
opaque node with known shapes, whatever the lengths and however it is run.

Where no transform or mode observes operators, calls bypass them: torch.library takes longer to call
one than a GPU takes for a thousand tokens, and its operators have no forward mode (their tangents
would silently be zero). What `torch.func` and forward mode see is in functions.py."""

# No deferred annotations here: torch.library reads the types to make the operators' schemas.
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.backends.called_forms import Held, Operators, Way, asks_for_more
from regard.backends.contract import Rows
from regard.backends.functions import UNCOMPILED, Attend, AttendVjp, refuse_second
from regard.backends.passes import Call, Given, Moved, Operated, Passes, Pull, floating, taken_apart
from regard.between_graphs import between_graphs
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.transforms import in_forward_mode, may_learn, transformed, unobserved
from regard.values import decode


def register(
    passes: Passes,
    empty_kept: Callable[[Tensor], Tensor],
    empty_out: Callable[[Tensor, Tensor], Tensor],
    *,
    reads: bool = False,
    inside: Operated | None = None,
) -> Operators:
    """Make operators regard::{name}, regard::{name}_backward and regard::{name}_tangent.

    `empty_kept` gives, from an lse, an empty tensor like the one that the forward pass keeps, and
    `empty_out`, from q and v, one like its output. `inside` runs the passes for the operators. With
    `reads` they are regard::{name}_reads and so on, and look at tensors on the host: the compiler
    leaves them out of the CUDA graphs that it records.
    """
    operated = inside or Operated(passes)
    name = f"{passes.name}_reads" if reads else passes.name
    tags = (torch.Tag.cudagraph_unsafe,) if reads else ()

    @torch.library.custom_op(f"regard::{name}", mutates_args=(), tags=tags)
    def there(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        seed: Tensor | None,
        tensors: Sequence[Tensor],
        text: str,
        integers: Sequence[int],
        floats: Sequence[float],
        softcap: float | None,
        dropout: float,
        statistics: bool,
        bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        _refuse_forward_mode(name)
        call = Call((text, integers, floats, softcap, dropout))
        x = call.inputs(q, k, v, sink, seed, *tensors)
        rows, keeps = operated.forward(call, x, statistics=statistics)
        return *rows, keeps

    @there.register_fake
    def _(
        q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        _refuse_forward_mode(name)
        statistics = rest[-2]
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = empty_out(q, v)
        lse = q.new_empty(q.shape[:3], dtype=dtype)
        more = [torch.empty_like(lse) if statistics else lse.new_empty(0) for _ in range(2)]
        return out, lse, more[0], more[1], empty_kept(lse)

    @torch.library.custom_op(f"regard::{name}_backward", mutates_args=(), tags=tags)
    def back(
        g_out: Tensor | None,
        g_lse: Tensor | None,
        g_entropy: Tensor | None,
        out: Tensor,
        lse: Tensor,
        keeps: Tensor,
        entropy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        seed: Tensor | None,
        tensors: Sequence[Tensor],
        text: str,
        integers: Sequence[int],
        floats: Sequence[float],
        softcap: float | None,
        dropout: float,
        bias: bool,
    ) -> list[Tensor]:
        _refuse_forward_mode(f"{name}_backward")
        call = Call((text, integers, floats, softcap, dropout))
        x = call.inputs(q, k, v, sink, seed, *tensors)
        rows, pull = Rows(out, lse, lse, entropy), Pull(g_out, g_lse, g_entropy)
        given = operated.backward(call, x, rows, keeps, pull, bias=bias)
        sinks = [] if given.sink is None or sink is None else [given.sink.to(sink.dtype)]
        # A scalar stands for what wants no gradient, or has none.
        own = [
            t.new_zeros(()) if g is None else g.to(t.dtype)
            for g, t in zip(given.own(x), tensors, strict=True)
            if t.is_floating_point()
        ]
        return [*(_like(g, t) for g, t in zip(given[:3], (q, k, v), strict=True)), *sinks, *own]

    @back.register_fake
    def _(
        g_out: Tensor | None,
        g_lse: Tensor | None,
        g_entropy: Tensor | None,
        out: Tensor,
        lse: Tensor,
        keeps: Tensor,
        entropy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        seed: Tensor | None,
        tensors: Sequence[Tensor],
        text: str,
        integers: Sequence[int],
        floats: Sequence[float],
        softcap: float | None,
        dropout: float,
        bias: bool,
    ) -> list[Tensor]:
        _refuse_forward_mode(f"{name}_backward")
        values = decode(text, integers, floats, tensors, here=True)
        learns = (True, False, bias)
        own = [
            torch.empty_like(t) if learned else t.new_empty(())
            for value, learned in zip(values, learns, strict=True)
            for t in (() if value is None else value.tensors())
            if t.is_floating_point()
        ]
        sinks = [] if sink is None else [torch.empty_like(sink)]
        return [torch.empty_like(t) for t in (q, k, v)] + sinks + own

    def differentiate(
        ctx: Any,
        g_out: Tensor | None,
        g_lse: Tensor | None,
        g_max: Tensor | None,
        g_entropy: Tensor | None,
        g_kept: Tensor | None,
    ) -> tuple[Any, ...]:
        out, lse, keeps, entropy, q, k, v, sink, seed, *tensors = ctx.saved_tensors
        text, integers, floats, softcap, dropout, bias, listed = ctx.rest
        g_entropy = g_entropy if entropy.numel() == lse.numel() else None
        # text, integers, floats, softcap, dropout, statistics, bias. An empty list of numbers
        # could be one of tensors as well, so torch.library wants a list back for it.
        lists: tuple[Any, Any] = (None if integers else [], None if floats else [])
        constants = (None, *lists, None, None, None, None)
        if g_out is None and g_lse is None and g_entropy is None:
            return None, None, None, None, None, [None] * listed, *constants
        given = back(
            g_out, g_lse, g_entropy, out, lse, keeps, entropy, q, k, v, sink, seed, tensors, text,
            integers, floats, softcap, dropout, bias,
        )  # fmt: skip
        dq, dk, dv, *more = given
        d_sink = None if sink is None else more.pop(0)
        grads = iter(more)
        # A scalar stands for a bias that wants no gradient; torch.library wants one entry each.
        own = [next(grads) if t.is_floating_point() else None for t in tensors]
        own = [
            g if g is not None and g.shape == t.shape else None
            for g, t in zip(own, tensors, strict=True)
        ]
        return dq, dk, dv, d_sink, None, own or [None] * listed, *constants

    @torch.library.custom_op(f"regard::{name}_tangent", mutates_args=(), tags=tags)
    def onward(
        d_q: Tensor,
        d_k: Tensor,
        d_v: Tensor,
        d_sink: Tensor | None,
        d_tensors: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
        keeps: Tensor,
        entropy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        seed: Tensor | None,
        tensors: Sequence[Tensor],
        text: str,
        integers: Sequence[int],
        floats: Sequence[float],
        softcap: float | None,
        dropout: float,
        statistics: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        _refuse_forward_mode(f"{name}_tangent")
        call = Call((text, integers, floats, softcap, dropout))
        x = call.inputs(q, k, v, sink, seed, *tensors)
        moved = call.inputs(d_q, d_k, d_v, d_sink, seed, *d_tensors)
        rows = Rows(out, lse, lse, entropy)
        return passes.jvp(x, rows, keeps, moved, statistics=statistics)

    @onward.register_fake
    def _(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
        _refuse_forward_mode(f"{name}_tangent")
        out, lse, _, entropy = operands[5:9]
        return torch.empty_like(out), torch.empty_like(lse), torch.empty_like(entropy)

    def refuse(ctx: Any, *grads: Any) -> None:
        refuse_second(passes.name)

    torch.library.register_autograd(f"regard::{name}", differentiate, setup_context=_remember)
    torch.library.register_autograd(f"regard::{name}_backward", refuse)
    torch.library.register_autograd(f"regard::{name}_tangent", refuse)

    def attend(x: AttentionInputs, *, statistics: bool) -> tuple[Rows, Tensor]:
        if unobserved(x.tensors()):
            return passes.forward(x, statistics=statistics)
        call, (q, k, v, sink, seed, *tensors) = taken_apart(x)
        bias = x.bias is not None and may_learn(x.bias.tensors())
        # Programs that AOTInductor wrote hand over no list where it is empty, and crash or copy
        # what is in it where there may be none (torch 2.11): so something stands in.
        inside = tensors or [q]
        *rows, keeps = there(q, k, v, sink, seed, inside, *call.told, statistics, bias)
        return Rows(*rows), keeps

    def backward(x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull, *, bias: bool) -> Given:
        if unobserved(x.tensors()):
            return passes.backward(x, rows, kept, pull, bias=bias)
        call, (q, k, v, sink, seed, *tensors) = taken_apart(x)
        dq, dk, dv, *more = back(
            *pull, rows.out, rows.lse, kept, rows.entropy, q, k, v, sink, seed, tensors,
            *call.told, bias,
        )  # fmt: skip
        d_sink = None if sink is None else more.pop(0)
        n, m = (len(t) for t in (x.comparison.tensors(), floating(x.bias)))
        return Given(dq, dk, dv, d_sink, more[:n], more[len(more) - m :] if bias else [])

    def forward_mode(
        x: AttentionInputs, rows: Rows, kept: Tensor, moved: AttentionInputs, *, statistics: bool
    ) -> Moved:
        if unobserved(x.tensors()):
            return passes.jvp(x, rows, kept, moved, statistics=statistics)
        call, (q, k, v, sink, seed, *tensors) = taken_apart(x)
        _, (d_q, d_k, d_v, d_sink, _, *d_tensors) = taken_apart(moved)
        return Moved(
            *onward(
                d_q, d_k, d_v, d_sink, d_tensors, rows.out, rows.lse, kept, rows.entropy, q, k, v,
                sink, seed, tensors, *call.told, statistics,
            )
        )  # fmt: skip

    # Below all transforms a mode may still observe operators.
    seen = Passes(name, attend, backward, forward_mode)

    class Direct(torch.autograd.Function):
        """The passes past everything else, for plain calls that learn q, k and v alone. (One that
        `torch.func` knows takes longer to call.)"""

        @staticmethod
        def forward(
            ctx: Any, way: Way, rest: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor
        ) -> tuple[Tensor, ...]:
            rows, keeps = way.attended(q, k, v)
            ctx.save_for_backward(rows.out, rows.lse, keeps, rows.entropy, q, k, v)
            ctx.rest = way.backward, rest
            ctx.held = way.held, way.held.versions()
            ctx.set_materialize_grads(False)
            # In the place of an entropy that nobody asked for may stand a tensor of other calls
            # too, which must not hold on to this one.
            asked = rows.entropy.numel() == rows.lse.numel()
            ctx.mark_non_differentiable(rows.max_logit, *() if asked else (rows.entropy,))
            return tuple(rows)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
            out, lse, keeps, entropy, *qkv = ctx.saved_tensors
            backward, rest = ctx.rest
            g_out, g_lse, _, g_entropy = grad_outputs
            pull = Pull(g_out, g_lse, g_entropy if entropy.numel() == lse.numel() else None)
            given_back = [g for g in pull if g is not None]
            if not given_back:
                return (None,) * 5
            held, versions = ctx.held
            held.refuse_changed(versions)
            x = AttentionInputs(*qkv, *rest)
            rows = Rows(out, lse, lse, entropy)
            if asks_for_more(given_back):
                return None, None, *differentiable(x, rows, keeps, pull)
            given = backward(x, rows, keeps, pull.in_memory())
            each = zip(given, qkv, strict=True)
            return None, None, *(g if g.dtype is t.dtype else g.to(t.dtype) for g, t in each)

    def differentiable(
        x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull
    ) -> tuple[Tensor, ...]:
        call, tensors = taken_apart(x)
        wanted = (True, True, True, *(False for _ in tensors[3:]))
        saved = (rows.out, rows.lse, rows.entropy, kept)
        return AttendVjp.apply(seen, call, wanted, *pull, *saved, *tensors)  # type: ignore[no-any-return, no-untyped-call]

    def plain_backward(
        x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull
    ) -> Sequence[Tensor]:
        return passes.backward(x, rows, kept, pull, bias=False)[:3]

    def run(x: AttentionInputs, *, statistics: bool) -> Rows:
        if torch.compiler.is_compiling():
            return (transforming if transformed(x.tensors()) else observed)(x, statistics)
        inside = x.tensors()
        if transformed(inside):
            return transforming(x, statistics)
        if not unobserved(inside):
            return observed(x, statistics)
        learned = [t for t in inside if t.requires_grad] if torch.is_grad_enabled() else []
        if not learned:
            return passes.forward(x, statistics=statistics)[0]
        if all(t is x.q or t is x.k or t is x.v for t in learned):

            def attended(*_: Tensor) -> tuple[Rows, Tensor]:
                return passes.forward(x, statistics=statistics)

            way = Way(attended, plain_backward, Held(x))
            return learning(way, x.beside_tensors(), x.q, x.k, x.v)
        return transforming(x, statistics)

    def learning(way: Way, rest: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> Rows:
        return Rows(*Direct.apply(way, rest, q, k, v))  # type: ignore[no-untyped-call]

    def observed(x: AttentionInputs, statistics: bool) -> Rows:
        (out, lse, largest, entropy), _ = attend(x, statistics=statistics)
        return Rows(out, lse, largest.detach(), entropy)

    @between_graphs(UNCOMPILED)
    def transforming(x: AttentionInputs, statistics: bool) -> Rows:
        call, tensors = taken_apart(x)
        *rows, _ = Attend.apply(seen, call, statistics, *tensors)  # type: ignore[no-untyped-call]
        return Rows(*rows)

    return Operators(run, learning, differentiable)


def _refuse_forward_mode(name: str) -> None:
    """An operator's tangent would silently be zero. (Inside a function with a formula of its own,
    forward mode is off.)"""
    if in_forward_mode() and torch._C._is_fwd_grad_enabled():
        raise RegardError(
            f"the operator regard::{name} has no forward mode",
            got="a call where tensors may have tangents",
            accepted="regard.attention and regard.trace, which have it, outside compiled graphs",
        )


def _like(gradient: Tensor, t: Tensor) -> Tensor:
    """A gradient of t with its dtype, and with the strides that the compiler expects: those of
    t."""
    plain = gradient.is_contiguous() and t.is_contiguous()
    if plain or gradient.stride() == torch.empty_like(t, device="meta").stride():
        return gradient.to(t.dtype)
    return torch.empty_like(t).copy_(gradient)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink, seed, given, text, integers, floats, *more = inputs
    tensors = given if '"tensor"' in text else ()
    softcap, dropout, _, bias = more
    out, lse, _, entropy, keeps = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out, lse, keeps, entropy, q, k, v, sink, seed, *tensors)
    ctx.rest = (text, integers, floats, softcap, dropout, bias, len(given))
    # The text names functions by number; they must be there when the backward pass reads it.
    ctx.functions = decode(text, integers, floats, tensors, here=True) if "local" in text else ()
