"""What functions of PyTorch do to scores before the softmax and to weights after it, by the names
of these functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.watching.by_hand.axes import Axes, moved, reshaped
from regard.watching.by_hand.records import LostError, Scores, Weights, hides

MOVES = frozenset({
    "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "T", "mT", "H",
    "mH", "adjoint",
})  # fmt: skip
RESHAPES = frozenset({
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as",
})  # fmt: skip
COPIES = frozenset({
    "float", "half", "bfloat16", "double", "to", "type", "type_as", "contiguous", "clone", "detach",
    "cpu", "cuda", "alias", "requires_grad",
})  # fmt: skip

Args = Sequence[Any]
Named = dict[str, Any]


def name_of(func: Any) -> tuple[str, bool]:
    """What a function is called, and whether it writes to its first argument."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name.startswith("__"):
        return name.strip("_"), name == "__setitem__"
    return name.rstrip("_"), name.endswith("_")


def laid_out(
    axes: Axes, func: Any, name: str, args: Args, kwargs: Named, out: Tensor
) -> Axes | None:
    """The axes after a function that only moves numbers; None if it does more."""
    if name in COPIES:
        return axes if len(axes) == out.ndim else None
    if name in RESHAPES or (name == "getitem" and _adds_axes(args[1])):
        return reshaped(axes, out.shape)
    if name in MOVES:
        return moved(axes, lambda marked: func(marked, *args[1:], **kwargs))
    return None


def _adds_axes(index: Any) -> bool:
    every = index if isinstance(index, tuple) else (index,)
    return not any(map(_tensor, every)) and all(
        i is None or i is Ellipsis or i == slice(None) for i in every
    )


def _tensor(given: Any) -> bool:
    return isinstance(given, Tensor)


def changed_scores(
    scores: Scores, own: Tensor, name: str, args: Args, kwargs: Named, out: Tensor
) -> Scores:
    """Scores after a function that changes them. `own` is the tensor of these scores."""
    change = _CHANGES.get(name)
    if change is None:
        raise LostError(f"{name} changes the scores before the softmax")
    return change(scores, own, args, kwargs, out)


def _argument(place: int, name: str, args: Args, kwargs: Named) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _number(value: Any) -> float | None:
    """What is one number and can be read without waiting for a device or leaving autograd."""
    if isinstance(value, Tensor):
        plain = value.numel() == 1 and value.device.type == "cpu" and not value.requires_grad
        return float(value) if plain else None
    return float(value)


def _plus(
    sign: float, scores: Scores, own: Tensor, args: Args, kwargs: Named, out: Tensor
) -> Scores:
    first, second = args[0] if args else own, _argument(1, "other", args, kwargs)
    other = second if first is own else first
    by = sign * float(kwargs.get("alpha", 1))
    if first is not own and by != 1:
        raise LostError("scores are subtracted from something")
    if not isinstance(other, Tensor):
        other = own.new_full((1,) * own.ndim, float(other))
    return scores.plus(other, by, out)


def _times(scores: Scores, own: Tensor, args: Args, kwargs: Named, out: Tensor) -> Scores:
    first, second = args[0] if args else own, _argument(1, "other", args, kwargs)
    other = second if first is own else first
    number = _number(other)
    return scores.times_tensor(other, out) if number is None else scores.times(number)


def _over(scores: Scores, own: Tensor, args: Args, kwargs: Named, out: Tensor) -> Scores:
    other = _argument(1, "other", args, kwargs)
    if (args and args[0] is not own) or kwargs.get("rounding_mode") is not None:
        raise LostError("something is divided by scores, or they are rounded")
    number = _number(other)
    if number is None:
        return scores.times_tensor(other.reciprocal(), out)
    return scores.times(1 / number)


def _filled(scores: Scores, own: Tensor, args: Args, kwargs: Named, out: Tensor) -> Scores:
    mask, value = _argument(1, "mask", args, kwargs), _argument(2, "value", args, kwargs)
    if not hides(value):
        raise LostError("masked_fill replaces scores by values that do not mask them")
    return scores.hide(mask.bool(), out)


def _chosen(scores: Scores, own: Tensor, args: Args, kwargs: Named, out: Tensor) -> Scores:
    given = list(args) + [kwargs[n] for n in ("condition", "input", "self", "other") if n in kwargs]
    if len(given) != 3:
        raise LostError("where is called in a form that is not known")
    kept, taken, other = given if given[0].dtype != own.dtype else (given[1], given[0], given[2])
    if taken is own and hides(other):
        return scores.hide(kept.logical_not(), out)
    if other is own and hides(taken):
        return scores.hide(kept.bool(), out)
    raise LostError("where replaces scores by values that do not mask them")


def _written(scores: Scores, own: Tensor, args: Args, kwargs: Named, out: Tensor) -> Scores:
    mask, value = args[1], args[2]
    boolean = isinstance(mask, Tensor) and mask.dtype.itemsize == 1
    if not boolean or not hides(value):
        raise LostError("some scores are written over")
    # It indexes the first axes.
    return scores.hide(mask.bool()[(..., *(None,) * (own.ndim - mask.ndim))], own)


def _negated(scores: Scores, *_: Any) -> Scores:
    return scores.times(-1.0)


def _capped(scores: Scores, *_: Any) -> Scores:
    return scores.capped()


_CHANGES: dict[str, Callable[..., Scores]] = {
    "add": partial(_plus, 1.0),
    "radd": partial(_plus, 1.0),
    "sub": partial(_plus, -1.0),
    "subtract": partial(_plus, -1.0),
    "mul": _times,
    "multiply": _times,
    "rmul": _times,
    "div": _over,
    "divide": _over,
    "true_divide": _over,
    "truediv": _over,
    "neg": _negated,
    "negative": _negated,
    "tanh": _capped,
    "masked_fill": _filled,
    "where": _chosen,
    "setitem": _written,
}


def changed_weights(
    weights: Weights, own: Tensor, name: str, args: Args, kwargs: Named, out: Tensor
) -> Weights:
    """Weights after a function that leaves them what they are, but for rows that see nothing."""
    if name == "dropout":
        return replace(weights, dropped=weights.dropped or out is not own)
    if name == "nan_to_num" and _argument(1, "nan", args, kwargs) in (None, 0):
        return weights
    if name == "masked_fill" and not _argument(2, "value", args, kwargs):
        mask = _argument(1, "mask", args, kwargs)
        if any(_same(mask, hidden.tensor) for hidden in weights.scores.hidden):
            return weights
    raise LostError(f"{name} changes the weights between the softmax and the second product")


def _same(a: Tensor, b: Tensor) -> bool:
    alike = a.shape == b.shape and a.dtype == b.dtype
    # Some work the mask out a second time.
    return a is b or (alike and (a.data_ptr() == b.data_ptr() or torch.equal(a, b)))
