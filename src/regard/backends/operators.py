"""A forward and a backward pass as operators of torch.library, so that torch.compile and
torch.export see one opaque node with known shapes, whatever the lengths and however it is run.

Where nobody looks at operators, plain calls go past them: torch.library takes a quarter of a
millisecond to call one, as long as a GPU takes for thousands of tokens."""

# No deferred annotations here: torch.library reads the types to make the operators' schemas.
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from regard.backends.contract import Rows
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.values import decode, encode


class Given(NamedTuple):
    """Gradients of everything a call can learn; no `bias` where none was asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    comparison: list[Tensor]
    bias: list[Tensor]


class Pull(NamedTuple):
    """Gradients of what a call gave; None where nothing depends on it."""

    out: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None


@runtime_checkable
class Forward(Protocol):
    """Output and row statistics, and a tensor that the backward pass wants back."""

    def __call__(self, x: AttentionInputs, *, statistics: bool) -> tuple[Rows, Tensor]: ...


@runtime_checkable
class Backward(Protocol):
    """Gradients, from what the forward pass gave (without the largest logit) and kept."""

    def __call__(
        self, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull, *, bias: bool
    ) -> Given: ...


@runtime_checkable
class Run(Protocol):
    """The forward pass, differentiable in q, k, v, sink, and the tensors of score and bias."""

    def __call__(self, x: AttentionInputs, *, statistics: bool) -> Rows: ...


def register(
    name: str,
    forward: Forward,
    backward: Backward,
    kept: Callable[[Tensor], Tensor],
    empty_out: Callable[[Tensor, Tensor], Tensor],
) -> Run:
    """Make operators regard::{name} and regard::{name}_backward.

    `kept` gives, from an lse, an empty tensor like the one that `forward` keeps, and `empty_out`,
    from q and v, one like its output.
    """

    def directly(x: AttentionInputs, statistics: bool) -> tuple[Rows, Tensor]:
        with _no_autocast(x.q):
            return forward(x, statistics=statistics)

    @torch.library.custom_op(f"regard::{name}", mutates_args=())
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
        x = _inputs(q, k, v, sink, seed, tensors, text, integers, floats, softcap, dropout)
        rows, keeps = directly(x, statistics)
        return *rows, keeps

    @there.register_fake
    def _(
        q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        statistics = rest[-2]
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = empty_out(q, v)
        lse = q.new_empty(q.shape[:3], dtype=dtype)
        more = [torch.empty_like(lse) if statistics else lse.new_empty(0) for _ in range(2)]
        return out, lse, more[0], more[1], kept(lse)

    @torch.library.custom_op(f"regard::{name}_backward", mutates_args=())
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
        x = _inputs(q, k, v, sink, seed, tensors, text, integers, floats, softcap, dropout)
        rows, pull = Rows(out, lse, lse, entropy), Pull(g_out, g_lse, g_entropy)
        with _no_autocast(q):
            given = backward(x, rows, keeps, pull, bias=bias)
        sinks = [] if given.sink is None or sink is None else [given.sink.to(sink.dtype)]
        learned = [t for t in tensors if t.is_floating_point()]
        own = given.comparison + (
            given.bias or [t.new_zeros(()) for t in learned[len(given.comparison) :]]
        )
        return [
            *(_like(g, t) for g, t in zip(given[:3], (q, k, v), strict=True)),
            *sinks,
            *(g.to(t.dtype) for g, t in zip(own, learned, strict=True)),
        ]

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
        comparison, _, _ = decode(text, integers, floats, tensors, here=True)
        assert comparison is not None
        learned = [t for t in tensors if t.is_floating_point()]
        n = len(comparison.tensors())
        own = [
            torch.empty_like(t) if i < n or bias else t.new_empty(()) for i, t in enumerate(learned)
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
        text, integers, floats, softcap, dropout, bias = ctx.rest
        g_entropy = g_entropy if entropy.numel() == lse.numel() else None
        # text, integers, floats, softcap, dropout, statistics, bias. An empty list of numbers
        # could be one of tensors as well, so torch.library wants a list back for it.
        lists: tuple[Any, Any] = (None if integers else [], None if floats else [])
        constants = (None, *lists, None, None, None, None)
        if g_out is None and g_lse is None and g_entropy is None:
            return None, None, None, None, None, [None] * len(tensors), *constants
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
        return dq, dk, dv, d_sink, None, own, *constants

    def refuse_second(ctx: Any, *grads: Any) -> None:
        raise RegardError(
            f"the {name} backend is differentiable once",
            got="a gradient of a gradient",
            accepted='backend="reference", which can be differentiated any number of times',
            do='pass backend="reference" to the call whose second derivative you need',
        )

    torch.library.register_autograd(f"regard::{name}", differentiate, setup_context=_remember)
    torch.library.register_autograd(f"regard::{name}_backward", refuse_second)

    class Direct(torch.autograd.Function):
        """The passes past the operators, for calls that learn q, k and v alone."""

        @staticmethod
        def forward(
            ctx: Any, x: AttentionInputs, statistics: bool, q: Tensor, k: Tensor, v: Tensor
        ) -> tuple[Tensor, ...]:
            rows, keeps = directly(x, statistics)
            ctx.save_for_backward(rows.out, rows.lse, keeps, rows.entropy, q, k, v)
            ctx.rest = (x.comparison, x.mask, x.bias, x.softcap, x.sink, x.dropout, x.seed)
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(rows.max_logit)
            return tuple(rows)

        @staticmethod
        def backward(ctx: Any, *pulls: Tensor | None) -> tuple[Any, ...]:
            out, lse, keeps, entropy, *qkv = ctx.saved_tensors
            g_out, g_lse, _, g_entropy = pulls
            pull = Pull(g_out, g_lse, g_entropy if entropy.numel() == lse.numel() else None)
            if pull == (None, None, None):
                return (None,) * 5
            x = AttentionInputs(*qkv, *ctx.rest)
            if torch.is_grad_enabled():
                # These gradients may be differentiated: the operator says that they cannot be.
                text, integers, floats, tensors = encode([x.comparison, x.mask, x.bias], here=True)
                given = back(
                    *pull, out, lse, keeps, entropy, *qkv, x.sink, x.seed, tensors, text, integers,
                    floats, x.softcap, x.dropout, False,
                )  # fmt: skip
                return None, None, *given[:3]
            with _no_autocast(x.q):
                given = backward(x, Rows(out, lse, lse, entropy), keeps, pull, bias=False)
            return None, None, given.q.to(x.q.dtype), given.k.to(x.k.dtype), given.v.to(x.v.dtype)

    def run(x: AttentionInputs, *, statistics: bool) -> Rows:
        inside = x.tensors()
        learned = [t for t in inside if t.requires_grad] if torch.is_grad_enabled() else []
        if _unobserved(inside) and all(t is x.q or t is x.k or t is x.v for t in learned):
            if not learned:
                return directly(x, statistics)[0]
            return Rows(*Direct.apply(x, statistics, x.q, x.k, x.v))  # type: ignore[no-untyped-call]
        text, integers, floats, tensors = encode([x.comparison, x.mask, x.bias], here=True)
        bias = x.bias is not None and any(t.requires_grad for t in x.bias.tensors())
        out, lse, max_logit, entropy, _ = there(
            x.q, x.k, x.v, x.sink, x.seed, tensors, text, integers, floats, x.softcap, x.dropout,
            statistics, bias and torch.is_grad_enabled(),
        )  # fmt: skip
        return Rows(out, lse, max_logit.detach(), entropy)

    return run


def _unobserved(tensors: list[Tensor]) -> bool:
    """Whether nobody looks at operators: no compiler, no mode, no transform, no kind of tensor that
    is not plain."""
    return (
        not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
        and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    )


def _no_autocast(q: Tensor) -> AbstractContextManager[Any]:
    kind = q.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _like(gradient: Tensor, t: Tensor) -> Tensor:
    """A gradient of t in its type, and in memory as the compiler was told: like t itself."""
    told = torch.empty_like(t, device="meta").stride()
    if gradient.stride() == told:
        return gradient.to(t.dtype)
    return torch.empty_like(t).copy_(gradient)


def _inputs(
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
) -> AttentionInputs:
    comparison, mask, bias = decode(text, integers, floats, tensors, here=True)
    return AttentionInputs(q, k, v, comparison, mask, bias, softcap, sink, dropout, seed)  # type: ignore[arg-type]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink, seed, tensors, text, integers, floats, *more = inputs
    softcap, dropout, _, bias = more
    out, lse, _, entropy, keeps = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out, lse, keeps, entropy, q, k, v, sink, seed, *tensors)
    ctx.rest = (text, integers, floats, softcap, dropout, bias)
    # The text names functions by number; they must be there when the backward pass reads it.
    ctx.functions = decode(text, integers, floats, tensors, here=True) if "local" in text else ()
