"""The checker behind the shape annotations, in tests only: an int is a float, as Python has it.

jaxtyping's decorator binds the signature at each call and checks arguments a second time with the
result, which takes a third of the time of all tests. What stands in for it here checks each once,
around the call, and makes the check of a function when it is first called. Axes that have no more
than names are compared here. Whatever is wrong is told by jaxtyping's own.
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, get_args

import jaxtyping
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, TypeCheckError, _array_types, _decorator, _storage
from torch import Tensor


class GivenError(Exception):
    """A function was given what it may not be."""


class ReturnedError(Exception):
    """A function returned what it may not."""


_CONFIGURATION = BeartypeConf(
    is_pep484_tower=True, violation_param_type=GivenError, violation_return_type=ReturnedError
)
check = beartype(conf=_CONFIGURATION)
_thorough = jaxtyping.jaxtyped


def jaxtyped(fn: Any = None, *, typechecker: Any) -> Any:
    """jaxtyping.jaxtyped, for functions and dataclasses."""
    if fn is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if inspect.isclass(fn):
        made = vars(fn).get("__init__")
        if hasattr(fn, "__dataclass_fields__") and inspect.isfunction(made):
            fn.__init__ = made if hasattr(made, "__wrapped__") else _checked(made, typechecker)
        return fn
    if not inspect.isfunction(fn) or inspect.isgeneratorfunction(fn):
        return _thorough(fn, typechecker=typechecker)
    return _checked(fn, typechecker)


_NO_AXES: tuple[dict[str, Any], ...] = ({}, {}, {}, {})


def _checked(fn: Callable[..., Any], typechecker: Any) -> Callable[..., Any]:
    types = _understood(fn)
    measured = any(map(_has_axes, types.values()))
    checking: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checking
        if jaxtyping.config.jaxtyping_disable:
            return fn(*args, **kwargs)
        if checking is None:
            checking = check(_typed(fn, types))
        memos = _storage.push_shape_memo({}) if measured else _NO_AXES
        try:
            return checking(*args, **kwargs)
        except GivenError:
            # Raises as well, and says what was wrong.
            return _thorough(fn, typechecker=typechecker)(*args, **kwargs)
        except ReturnedError as error:
            name, axes = f"{fn.__module__}.{fn.__qualname__}", _storage.shape_str(memos)
            raise TypeCheckError(f"{name} returned what it may not.\n{axes}") from error
        finally:
            if measured:
                _storage.pop_shape_memo()

    # Who looks for the caller of a function passes over such names.
    wrapped.__code__ = wrapped.__code__.replace(co_filename="<@tests.shapes>")
    return wrapped


_types: dict[tuple[str, str], Any] = {}
"""What annotations mean, by module and text; those that have a meaning where they stand."""


def _understood(fn: Callable[..., Any]) -> dict[str, Any]:
    """Its annotations as types; what is not known yet where a function is made may be anything."""

    def meant(annotation: Any) -> Any:
        if not isinstance(annotation, str):
            return annotation
        found = _types.get((fn.__module__, annotation), Any)
        if found is Any:
            found = _decorator._destring_annotation(annotation, fn.__globals__)
            _types[fn.__module__, annotation] = found
        return found

    return {name: meant(annotation) for name, annotation in fn.__annotations__.items()}


def _has_axes(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        return True
    return any(map(_has_axes, get_args(annotation)))


def _typed(fn: Callable[..., Any], types: dict[str, Any]) -> Callable[..., Any]:
    """The same function, whose annotations are types."""
    typed = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    typed.__kwdefaults__, typed.__annotations__ = fn.__kwdefaults__, types
    typed.__module__, typed.__qualname__ = fn.__module__, fn.__qualname__
    return typed


asked = type(AbstractArray).__instancecheck__


def is_such(annotation: Any, value: Any) -> bool:
    """Whether a value is what an annotation says; jaxtyping is asked where that is not plain."""
    if isinstance(value, Tensor):
        names, shape = _names(annotation, value.dtype), value.shape
        if names is not None and len(names) == len(shape):
            sizes = _storage.get_shape_memo()[0]
            for name, size in zip(names, shape, strict=True):
                if sizes.get(name, size) != size:
                    break
            else:
                sizes.update(zip(names, shape, strict=True))
                return True
    return asked(annotation, value)


@functools.cache
def _names(annotation: Any, dtype: torch.dtype) -> tuple[str, ...] | None:
    """Those of its axes, if they are all that a tensor of that dtype is asked for."""
    names = [getattr(axis, "name", None) for axis in annotation.dims]
    plain = [_array_types._NamedDim(name, broadcastable=False, treepath=False) for name in names]
    if list(annotation.dims) != plain or len({*names}) != len(names):
        return None
    _storage.push_shape_memo({})
    try:
        empty = torch.empty([0] * len(names), dtype=dtype, device="meta")
        return tuple(names) if asked(annotation, empty) else None
    finally:
        _storage.pop_shape_memo()


jaxtyping.jaxtyped = jaxtyped
type(AbstractArray).__instancecheck__ = is_such
