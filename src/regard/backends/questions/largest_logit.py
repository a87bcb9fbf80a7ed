"""The largest logit of each row as an operator, whose gradient a full graph of the compiler holds.

Every traced call has it, so it is in the graph of every compiled training step."""

# No deferred annotations here: torch.library reads the types to make the operators' schemas.
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.backends.passes import Call, no_autocast, taken_apart
from regard.backends.tiled.second_pass import QuestionGradients
from regard.inputs import AttentionInputs
from regard.transforms import may_learn
from regard.values import decode


@torch.library.custom_op("regard::largest_logit", mutates_args=())
def _there(
    row: Tensor,
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
) -> Tensor:
    return row.clone()


@_there.register_fake
def _(row: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(row)


@torch.library.custom_op("regard::largest_logit_backward", mutates_args=())
def _back(
    g: Tensor,
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
    x = Call((text, integers, floats, softcap, dropout)).inputs(q, k, v, sink, seed, *tensors)
    with no_autocast(q):
        _, given = QuestionGradients().max_logit(x, g, bias=bias)
    # A scalar stands for what wants no gradient, or has none.
    own = [
        t.new_zeros(()) if found is None else _like(found, t)
        for found, t in zip(given.own(x), tensors, strict=True)
        if t.is_floating_point()
    ]
    return [_like(given.q, q), _like(given.k, k), *own]


@_back.register_fake
def _(
    g: Tensor,
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
    values = decode(text, integers, floats, tensors, here=True)
    own = [
        torch.empty_like(t) if learned else t.new_empty(())
        for value, learned in zip(values, (True, False, bias), strict=True)
        for t in (() if value is None else value.tensors())
        if t.is_floating_point()
    ]
    return [torch.empty_like(q), torch.empty_like(k), *own]


def _like(gradient: Tensor, t: Tensor) -> Tensor:
    """With its dtype, and with the strides that the compiler expects."""
    return torch.empty_like(t).copy_(gradient)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, q, k, v, sink, seed, given, text, integers, floats, *rest = inputs
    tensors = given if '"tensor"' in text else ()
    ctx.save_for_backward(q, k, v, sink, seed, *tensors)
    ctx.rest = (text, integers, floats, *rest, len(given))
    # The text names functions by number; they must be there when the backward pass reads it.
    ctx.functions = decode(text, integers, floats, tensors, here=True) if "local" in text else ()


def _differentiate(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    q, k, v, sink, seed, *tensors = ctx.saved_tensors
    text, integers, floats, softcap, dropout, bias, listed = ctx.rest
    dq, dk, *more = _back(
        g, q, k, v, sink, seed, tensors, text, integers, floats, softcap, dropout, bias
    )
    grads = iter(more)
    found = [next(grads) if t.is_floating_point() else None for t in tensors]
    own = [
        d if d is not None and d.shape == t.shape else None
        for d, t in zip(found, tensors, strict=True)
    ]
    # An empty list of numbers could be one of tensors as well: torch.library wants a list for it.
    lists: tuple[Any, Any] = (None if integers else [], None if floats else [])
    return None, dq, dk, None, None, None, own or [None] * listed, None, *lists, None, None, None


torch.library.register_autograd("regard::largest_logit", _differentiate, setup_context=_remember)


def largest_logit(x: AttentionInputs, row: Tensor) -> Tensor:
    """The largest logits that a call found, with their gradient."""
    call, (q, k, v, sink, seed, *tensors) = taken_apart(x)
    bias = x.bias is not None and may_learn(x.bias.tensors())
    # Something stands in for an empty list, as for the operators of the forward pass.
    found: Tensor = _there(row, q, k, v, sink, seed, tensors or [q], *call.told, bias)
    return found
