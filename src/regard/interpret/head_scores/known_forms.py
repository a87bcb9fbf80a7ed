"""Forms of models that were seen before: a model that has not changed need not show its own again.

What a form depends on is the code of a model's modules, what they are made of and set to, and what
kind of text it reads. All of this is compared; where a model holds something of which it cannot be
seen whether it changes, its form is seen anew each time. What is not seen are numbers that are
written through `.data` or NumPy. A form holds paths alone: weights are read anew at every call.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from regard.interpret.head_scores.model_form import Form, form_of
from regard.interpret.interventions.runs import Runner, arguments

MOST = 16
"""Kinds of texts that are remembered of a model."""
MOST_PARTS = 200_000
"""What is looked through of a model: of one that holds more, a run is as soon done."""
_PLAIN = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
)
_BY_NAME = frozenset({dict, OrderedDict, defaultdict})
_SEVERAL = _BY_NAME | {list, tuple, set, frozenset}


class _Known(NamedTuple):
    """Of one model."""

    model: ref[nn.Module]
    state: _State
    forms: dict[Hashable, Form]
    """By the kind of the text."""


_KNOWN: dict[int, _Known] = {}
"""By the identity of a model."""


def known_form(runner: Runner, text: Any) -> Form:
    """The form of a model that reads a text; it is run where it is not known."""
    model, kind = runner.model, _kind(text)
    state = None if kind is None else _State.of(model)
    if kind is None or state is None:
        return form_of(runner, text)
    key = id(model)
    known = _KNOWN.get(key)
    if known is None or known.model() is not model or known.state != state:
        # Bound here: when Python ends, models may outlive this module.
        forget = _KNOWN.pop
        known = _Known(ref(model, lambda _: forget(key, None)), state, {})
    found = known.forms.get(kind)
    if found is None:
        found = form_of(runner, text)
        if len(known.forms) >= MOST:
            known.forms.clear()
        # Known of the model as it was before: if a run changes it, the next one shows it again.
        known.forms[kind] = found
        _KNOWN[key] = known
    return found


class _State:
    """What a model is made of and set to. It keeps no part of the model alive."""

    def __init__(self, things: list[Any], values: list[Any]) -> None:
        try:
            self._things = [ref(thing) for thing in things]
        except TypeError:  # what cannot be told from another that comes to lie there
            raise _Unknown from None
        self._values = values

    @staticmethod
    def of(model: nn.Module) -> _State | None:
        """None where something cannot be compared."""
        things: list[Any] = []
        values: list[Any] = []
        try:
            _look(model, things, values)
            return _State(things, values)
        except _Unknown:
            return None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _State) or self._values != other._values:
            return False
        both = zip(self._things, other._things, strict=False)
        # What is gone is not what lies in its place now.
        same = all(mine() is theirs() is not None for mine, theirs in both)
        return same and len(self._things) == len(other._things)

    __hash__ = None  # type: ignore[assignment]


class _Unknown(Exception):  # noqa: N818  it is no error: the model is then run
    """Something of which it cannot be seen whether it changes."""


def _look(start: Any, things: list[Any], values: list[Any]) -> None:
    """All that can be reached from a model: what has an identity, and plain values."""
    met, left = set[int](), [start]
    while left:
        one = left.pop()
        kind = type(one)
        if len(values) > MOST_PARTS:
            raise _Unknown
        if kind in _SEVERAL:
            inside = (*one, *one.values()) if kind in _BY_NAME else one
            values.append(len(one))
            for each in inside:
                # Most is plain, or nothing.
                if type(each) in _PLAIN:
                    values.append(each)
                elif type(each) in _SEVERAL and not each:
                    values.append(0)
                else:
                    left.append(each)
            continue
        if id(one) in met:
            continue
        met.add(id(one))
        things.append(one)
        if isinstance(one, Tensor):
            values += _of_tensor(one)
        elif isinstance(one, nn.Module):
            left += type(one), type(one).forward, vars(one)
        elif isinstance(one, types.MethodType):
            things[-1:] = [one.__func__]
            left.append(one.__self__)
        elif not isinstance(one, (types.FunctionType, types.BuiltinFunctionType, type)):
            left.append(_settings(one))


def _settings(one: Any) -> dict[str, Any]:
    found = getattr(one, "__dict__", None)
    if type(found) is not dict:
        raise _Unknown
    return found


def _of_tensor(one: Tensor) -> tuple[Any, ...]:
    try:
        return one._version, one.data_ptr(), one.requires_grad
    except RuntimeError:  # tensors of inference have no versions, and others no memory
        raise _Unknown from None


def _kind(text: Any) -> Hashable | None:
    """What runs of a model may depend on, of a text; None where it cannot be told."""
    args, kwargs = arguments(text)
    told: list[Hashable] = [len(args), *kwargs]
    for given in (*args, *kwargs.values()):
        if isinstance(given, Tensor):
            told.append((given.shape, given.dtype, given.device))
        elif type(given) in _PLAIN:
            told.append((type(given), given))
        else:
            return None
    return tuple(told)
