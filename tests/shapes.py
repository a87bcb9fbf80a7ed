"""The checker behind the shape annotations, in tests only: an int is a float, as Python has it.

jaxtyping's decorator binds the signature at each call and checks arguments a second time with the
result, which takes a third of the time of all tests. What stands in for it here checks each once,
and makes the check of a function when it is first called. Errors are told by jaxtyping's own.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import TypeCheckError, _decorator, _storage

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
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


def _checked(fn: Callable[..., Any], typechecker: Any) -> Callable[..., Any]:
    signature = _understood(fn)
    checks: list[tuple[Callable[..., Any], Callable[..., Any] | None]] = []

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return fn(*args, **kwargs)
        if not checks:
            checks.append(_checks(fn, signature))
        (given, returned), memos = checks[0], _storage.push_shape_memo({})
        try:
            try:
                given(*args, **kwargs)
            except Exception:
                # Raises as well, and says what was wrong.
                return _thorough(fn, typechecker=typechecker)(*args, **kwargs)
            out = fn(*args, **kwargs)
            if returned is not None:
                try:
                    returned(out)
                except Exception as error:
                    name, axes = f"{fn.__module__}.{fn.__qualname__}", _storage.shape_str(memos)
                    raise TypeCheckError(f"{name} returned what it may not.\n{axes}") from error
            return out
        finally:
            _storage.pop_shape_memo()

    # Who looks for the caller of a function passes over such names.
    wrapped.__code__ = wrapped.__code__.replace(co_filename="<@tests.shapes>")
    return wrapped


_types: dict[tuple[str, str], Any] = {}
"""What annotations mean, by module and text; those that have a meaning where they stand."""


def _understood(fn: Callable[..., Any]) -> inspect.Signature:
    """Its annotations as types; what is not known yet where a function is made may be anything."""

    def meant(annotation: Any) -> Any:
        if annotation is inspect.Signature.empty:
            return Any
        if not isinstance(annotation, str):
            return annotation
        found = _types.get((fn.__module__, annotation), Any)
        if found is Any:
            found = _decorator._destring_annotation(annotation, fn.__globals__)
            _types[fn.__module__, annotation] = found
        return found

    signature = inspect.signature(fn)
    given = [p.replace(annotation=meant(p.annotation)) for p in signature.parameters.values()]
    return signature.replace(parameters=given, return_annotation=meant(signature.return_annotation))


def _checks(
    fn: Callable[..., Any], signature: inspect.Signature
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Of what a function is given, and of what it returns."""
    named = fn.__name__, fn.__qualname__, fn.__module__
    asked = signature.replace(return_annotation=Any)
    arguments = check(_decorator._make_fn_with_signature(*named, asked, output=False))
    if signature.return_annotation is Any:
        return arguments, None
    only = inspect.Signature(return_annotation=signature.return_annotation)
    returned, name = _decorator._make_fn_with_signature(*named, only, output=True)
    returned = check(returned)
    return arguments, lambda out: returned(**{name: out})


jaxtyping.jaxtyped = jaxtyped
