"""Values: immutable, compared by content, printed as the call that makes them.

Masks, scores and biases are values. A value holds numbers, names, tensors and other values, and
can be taken apart into a text, lists of integers and floats and a list of tensors: the form in
which operators (which take nothing else) and files carry it.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeVar, get_origin, get_type_hints
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from regard.errors import RegardError

Pick = slice | Tensor
"""Which entries of an axis to keep: a slice (a view) or an index tensor (a copy)."""


V = TypeVar("V", bound="Value")


class Shape(NamedTuple):
    """The lengths a value meets when it is used: [B, H, Q, K]."""

    B: int
    H: int
    Q: int
    K: int


def end_aligned(offset: int | None, shape: Shape) -> int:
    """Where query 0 stands among the keys; by default the last query stands at the last key."""
    return shape.K - shape.Q if offset is None else whole("offset", offset)


def whole(name: str, value: int) -> int:
    """A whole number of any kind as an int; anything else is refused."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise RegardError(f"{name} must be a whole number", got=f"{value!r} ({type(value).__name__})")


def whole_numbers(
    given: object, axes: tuple[int, ...], problem: str, accepted: str, do: str = ""
) -> Tensor:
    """Whole numbers of any kind as a tensor with so many axes; anything else is refused."""
    tensor = given
    if not isinstance(given, Tensor):
        try:
            tensor = torch.tensor(given)
        except (TypeError, ValueError, RuntimeError):
            raise RegardError(problem, got=f"{given!r:.80}", accepted=accepted, do=do) from None
    assert isinstance(tensor, Tensor)
    if not tensor.numel() and not isinstance(given, Tensor):
        tensor = tensor.long()
    fractional = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    if tensor.ndim not in axes or fractional:
        few = tensor.numel() < 9 and tensor.device.type == "cpu"
        shown = tensor.tolist() if few and tensor.ndim < 2 else list(tensor.shape)
        raise RegardError(problem, got=f"{tensor.dtype} {shown}", accepted=accepted, do=do)
    return tensor


def readable(tensor: Tensor) -> bool:
    """Whether the values of a tensor may be read: that waits for no device, and it is not a
    placeholder while a call is compiled, traced or transformed."""
    return (
        tensor.device.type == "cpu"
        and runs_as_written()
        and type(tensor) in (Tensor, torch.nn.Parameter)
    )


def runs_as_written() -> bool:
    """Whether nothing compiles, traces or transforms what runs here: tensors that are made now may
    be kept for calls to come."""
    return (
        not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
    )


def broadcasts(have: int, need: int) -> bool:
    """Whether an axis of one length serves for another. (`have in (1, need)` would be answered
    wrongly by the compiler when a length is symbolic.)"""
    return have == 1 or have == need


class Axes(NamedTuple):
    """The axes of a caller's tensors: [*lead, H, N, D], or without H."""

    lead: tuple[int, ...]
    heads: bool

    @property
    def rank(self) -> int:
        return len(self.lead) + self.heads + 2

    def fold(self, table: Tensor, what: str) -> Tensor:
        """A tensor of pairs [*lead, H, Q, K] as [B, H, Q, K], any of its axes 1. One with other
        axes stays as it is, if there is one thing it can mean."""
        if self.rank > 4 and table.ndim == 4 and table.shape[0] != 1:
            raise RegardError(
                f"a {what} of four axes could mean two things for inputs of {self.rank}",
                got=f"{list(table.shape)}",
                accepted=f"{self._pairs()}, any axis 1; or [1, H, Q, K]",
            )
        if table.ndim != self.rank or self.rank == 4:
            return table
        n = len(self.lead)
        if not all(broadcasts(*pair) for pair in zip(table.shape, self.lead, strict=False)):
            raise RegardError(
                f"the tensor of a {what} does not fit the call",
                got=f"{list(table.shape)}",
                accepted=f"{self._pairs()}, any axis 1",
            )
        table = table if self.heads else table.unsqueeze(-3)
        if all(length == 1 for length in table.shape[:n]):
            return table.reshape(1, *table.shape[n:])
        return table.expand(*self.lead, *table.shape[n:]).flatten(0, n - 1)

    def _pairs(self) -> str:
        return f"[{', '.join([*map(str, self.lead), *(['H'] if self.heads else []), 'Q', 'K'])}]"


class Local:
    """A part of a value that only this process has, such as a function: operators, and the backward
    passes that they leave behind, name it by its number; no file ever holds one."""

    _all: ClassVar[WeakValueDictionary[int, Local]] = WeakValueDictionary()
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        self.number = next(Local._numbers)
        Local._all[self.number] = self


class Encoded(NamedTuple):
    """A value taken apart. Numbers stay apart from the text so that they can be symbolic."""

    text: str
    integers: list[int | torch.SymInt]
    floats: list[float | torch.SymFloat]
    tensors: list[Tensor]


class Value:
    """Base of masks, scores and biases. Subclasses are frozen dataclasses."""

    __match_args__: ClassVar[tuple[str, ...]] = ()
    _keywords: ClassVar[tuple[str, ...]] = ("offset",)
    """Parts that are given, and printed, by name."""
    _kinds: ClassVar[dict[str, type[Value]]] = {}

    kinds_made: ClassVar[int] = 0
    """How many classes of values have been defined, some perhaps anew under an old name."""

    def __init_subclass__(cls) -> None:
        Value._kinds[cls.__name__] = cls
        Value.kinds_made += 1

    def _parts(self) -> list[Any]:
        return [getattr(self, name) for name in self.__match_args__]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(a, b) for a, b in zip(self._parts(), other._parts(), strict=True))

    def __hash__(self) -> int:
        parts = self._parts()
        return hash((type(self), *map(_mark, parts)))

    def __repr__(self) -> str:
        shown = [
            f"{name}={_show(part)}" if name in self._keywords else _show(part)
            for name, part in zip(self.__match_args__, self._parts(), strict=True)
            if part is not None or name not in self._keywords
        ]
        return f"{self._called()}({', '.join(shown)})"

    def _called(self) -> str:
        """The name of the function that makes such a value: GlobalTokens is global_tokens."""
        name = type(self).__name__.removesuffix("Score")
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")

    def map_tensors(self: V, change: Callable[[Tensor], Tensor]) -> V:
        """The same value with every tensor changed.

        >>> from regard import masks
        >>> masks.padding(torch.tensor([3, 5])).map_tensors(lambda t: t + 1).limit
        tensor([4, 6])
        """
        return type(self)(*(_mapped(p, change) for p in self._parts()))

    def to(self: V, device: torch.device | str) -> V:
        """The same value with every tensor on a device."""
        return self.map_tensors(lambda t: t.to(device))

    def detach(self: V) -> V:
        """The same value, cut from autograd."""
        return self.map_tensors(Tensor.detach)

    def tensors(self) -> list[Tensor]:
        """Every tensor inside, in a fixed order."""
        found: list[Tensor] = []
        for part in self._parts():
            if isinstance(part, Tensor):
                found.append(part)
            elif isinstance(part, tuple):
                found += part
            elif isinstance(part, Value):
                found += part.tensors()
        return found

    def is_local(self) -> bool:
        """Whether there is a part inside that only this process has."""
        return any(
            part.is_local()
            if isinstance(part, Value)
            else callable(part) or isinstance(part, Local)
            for part in self._parts()
        )


def encode(values: Sequence[Value | None], *, here: bool = False) -> Encoded:
    """Take values apart. `decode` puts them together again: `here`, in this process, also those
    made of functions."""
    found = Encoded("", [], [], [])
    text = ",".join([_encode(v, found, here) for v in values])
    return Encoded(f"[{text}]", found.integers, found.floats, found.tensors)


def _encode(part: Any, found: Encoded, here: bool) -> str:
    if part is None:
        return "null"
    if isinstance(part, bool):
        return "true" if part else "false"
    if isinstance(part, Value):
        inner = "".join(["," + _encode(p, found, here) for p in part._parts()])
        return f'["{type(part).__name__}"{inner}]'
    if isinstance(part, Tensor):
        found.tensors.append(part)
        return f'{{"tensor":{len(found.tensors) - 1}}}'
    if isinstance(part, tuple):
        return f'{{"tuple":[{",".join([_encode(p, found, here) for p in part])}]}}'
    if isinstance(part, Local) and here:
        return f'{{"local":{part.number}}}'
    if isinstance(part, (float, torch.SymFloat)):
        found.floats.append(part)
        return f'{{"float":{len(found.floats) - 1}}}'
    if isinstance(part, (int, torch.SymInt)):
        found.integers.append(part)
        return f'{{"integer":{len(found.integers) - 1}}}'
    if isinstance(part, Local) or callable(part):
        raise RegardError(
            "a value made of a function cannot be written down",
            got=_show(part),
            do="write a mask out as a table: masks.keep(mask.dense(queries, keys))",
        )
    raise RegardError(f"a value holds a {type(part).__name__}, which cannot be encoded")


def decode(
    text: str,
    integers: Sequence[int | torch.SymInt],
    floats: Sequence[float | torch.SymFloat],
    tensors: Sequence[Tensor],
    *,
    here: bool = False,
) -> list[Value | None]:
    """Put values together again; unknown names and broken text are refused.

    >>> from regard import masks
    >>> decode(*encode([masks.causal() & masks.window(4)]))
    [causal() & window(4)]
    """
    lists: dict[str, Sequence[Any]] = {"integer": integers, "float": floats, "tensor": tensors}

    def build(node: Any) -> Any:
        match node:
            case None | bool():
                return node
            case {"integer": int(i)} | {"float": int(i)} | {"tensor": int(i)} if len(node) == 1:
                found = lists[next(iter(node))]
                if not isinstance(i, bool) and 0 <= i < len(found):
                    return found[i]
            case {"tuple": list(parts)} if len(node) == 1:
                return tuple(map(build, parts))
            case {"local": int(i)} if len(node) == 1 and here and i in Local._all:
                return Local._all[i]
            case [str(name), *parts] if name in Value._kinds:
                kind = Value._kinds[name]
                built = [build(part) for part in parts]
                if _fit(built, kind):
                    return kind(*built)
        raise RegardError("a stored value cannot be read", got=repr(node)[:80])

    try:
        nodes = json.loads(text)
        if isinstance(nodes, list) and all(
            node is None or isinstance(node, list) for node in nodes
        ):
            return [build(node) for node in nodes]
    except (ValueError, RecursionError) as error:
        if isinstance(error, RegardError):
            raise
        raise RegardError("a stored value cannot be read", got=str(error)[:80]) from None
    raise RegardError("a stored value cannot be read", got=text[:80])


@cache
def _hints(kind: Any) -> list[Any]:
    hints = get_type_hints(kind)
    return [hints[name] for name in kind.__match_args__]


def _fit(parts: list[Any], kind: type[Value]) -> bool:
    """Whether parts are what a kind of value is made of."""
    if "__dataclass_fields__" not in vars(kind) or len(parts) != len(kind.__match_args__):
        return False
    symbolic = {torch.SymInt: int, torch.SymFloat: float}
    hints: list[Any] = _hints(kind)  # type: ignore[arg-type]
    for part, hint in zip(parts, hints, strict=True):
        known = symbolic.get(type(part))
        if get_origin(hint) is tuple:
            if not isinstance(part, tuple) or not all(isinstance(p, Tensor) for p in part):
                return False
            continue
        if isinstance(part, bool) and hint is not bool:
            return False
        if not isinstance(part if known is None else known(), hint):
            return False
    return True


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.device == b.device and bool(torch.equal(a, b))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _mark(part: Any) -> Any:
    """What a part adds to a hash; tensors that are equal have equal shapes."""
    if isinstance(part, tuple):
        return tuple(map(_mark, part))
    return tuple(part.shape) if isinstance(part, Tensor) else part


def _mapped(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, tuple):
        return tuple(map(change, part))
    return part.map_tensors(change) if isinstance(part, Value) else part


def _show(part: Any) -> str:
    if isinstance(part, Tensor):
        if part.numel() <= 8 and part.device.type == "cpu":
            return str(part.tolist())
        return f"<{str(part.dtype).removeprefix('torch.')} {list(part.shape)}>"
    if isinstance(part, Local) or not callable(part):
        return repr(part)
    return str(getattr(part, "__name__", type(part).__name__))
