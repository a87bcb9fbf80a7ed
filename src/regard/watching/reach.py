"""Whether the code of a module can reach attention that only a function mode sees.

A function mode has PyTorch ask about every function that is called, which takes longer than a card
takes for a short layer. Modules of PyTorch and of known packages are read instead: the code of
their methods, and of the functions that these call. What names none of PyTorch's attention
functions, and does not multiply matrices around a softmax, needs no asking. Anybody else's code may
do anything, and is asked about.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.hooks import RemovableHandle

from regard.watching.module_calls import compiled_in_place

READ = ("transformers", "peft")
"""Packages whose code is read."""
HARMLESS = ("torch", "regard", "accelerate", *READ)
"""Packages whose hooks attend to nothing."""
EAGER = frozenset({"eager_attention_forward", "_upcast_and_reordered_attn"})
"""What modules of transformers call instead of their attention interface, where its implementation
is "eager": never while they are watched."""

_PRODUCTS = frozenset({"matmul", "bmm", "mm", "einsum", "baddbmm", "addmm"})
_NAMES = ("dot_product", "flex_attention", "multi_head_attention", "multiheadattention", "varlen")
_FUNCTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


class Reach:
    """Where PyTorch has to ask about each function that a model calls, so that nothing goes
    unseen."""

    def __init__(
        self,
        modules: Collection[nn.Module] = (),
        *,
        asks: bool = True,
        islands: Iterable[str] = (),
    ) -> None:
        self.islands = frozenset(islands)
        """Paths of modules in which it need not, if it has to elsewhere."""
        self._modules, self._asks = modules, asks
        self._hooks = 0

    def asks(self) -> bool:
        """Whether it has to somewhere. Modules are looked at again if hooks were added since."""
        if not self._asks and self._hooks != _hooks_so_far():
            self.count_hooks()
            self._asks = changed(self._modules)
        return self._asks

    def count_hooks(self) -> None:
        """The hooks that there are by now are known."""
        self._hooks = _hooks_so_far()

    def forget_modules(self) -> None:
        """Hold the modules no longer."""
        self._modules = ()


def never_attends(module: nn.Module) -> bool:
    """PyTorch's own modules but two. Each that is hooked costs time in every run: more than a card
    takes for it."""
    kind: Any = type(module)
    return _kind_never_attends(kind)


@cache
def _kind_never_attends(kind: type) -> bool:
    own = kind.__module__.startswith("torch.nn.modules.")
    return own and not issubclass(kind, (nn.MultiheadAttention, nn.TransformerEncoder))


def needs_asking(modules: Collection[nn.Module], apart: tuple[type, ...] = ()) -> bool:
    """Whether one of the modules of a model may attend where only a function mode sees it. `apart`
    are classes whose own methods are known not to."""
    return changed(modules) or any(
        _kind_needs_asking(kind, apart) for kind in set(map(type, modules))
    )


def changed(modules: Iterable[nn.Module]) -> bool:
    """Whether somebody made one of the modules do more than its class says."""
    return any(map(_changed, modules))


def _hooks_so_far() -> int:
    """How many hooks were ever put anywhere. As long as it stays, no module has new ones."""
    return RemovableHandle.next_id


def _changed(module: nn.Module) -> bool:
    here = vars(module)
    after, before = here["_forward_hooks"], here["_forward_pre_hooks"]
    return (
        "forward" in here
        or compiled_in_place(module)
        # Seldom are there any, and a monitor asks of every module.
        or bool(after and any(map(_strange, after.values())))
        or bool(before and any(map(_strange, before.values())))
    )


def _strange(hook: Any) -> bool:
    inner = getattr(hook, "func", hook)
    return _package(getattr(inner, "__module__", None) or "") not in HARMLESS


@cache
def _kind_needs_asking(kind: type, apart: tuple[type, ...]) -> bool:
    if kind.__module__.startswith("torch.nn."):
        return issubclass(kind, nn.MultiheadAttention)
    if kind.__module__.startswith("regard.nn."):
        return False
    return _package(kind.__module__) not in READ or _may_attend(kind, apart)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _may_attend(kind: type, apart: tuple[type, ...]) -> bool:
    if issubclass(kind, nn.MultiheadAttention):
        return True
    softmax = product = False
    for code in _reached(kind, apart):
        said = " ".join(code.co_names).lower()
        if any(name in said for name in _NAMES):
            return True
        softmax |= "softmax" in said
        product |= not _PRODUCTS.isdisjoint(code.co_names)
    return softmax and (product or any(map(_multiplies, _reached(kind, apart))))


def _reached(kind: type, apart: tuple[type, ...]) -> Iterator[CodeType]:
    """The code of the methods of a class, and of all functions of its package that they name."""
    waiting = [
        function
        for base in kind.__mro__
        if base not in apart and _package(base.__module__) in READ
        for name, held in vars(base).items()
        for function in _functions(held)
        if name not in EAGER
    ]
    known: set[CodeType] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if not isinstance(function, FunctionType) or function.__code__ in known:
            continue
        known.add(function.__code__)
        for code in _inside(function.__code__):
            yield code
            for name in code.co_names:
                held = function.__globals__.get(name)
                if isinstance(held, FunctionType) and name not in EAGER:
                    if _package(held.__module__ or "") in READ:
                        waiting.append(held)
                elif any(held is attends for attends in _FUNCTIONS):
                    yield _FUNCTIONS[1].__code__


def _functions(held: Any) -> Iterator[Any]:
    if isinstance(held, property):
        held = held.fget
    yield getattr(held, "__func__", held)


def _inside(code: CodeType) -> Iterator[CodeType]:
    """A piece of code, and those of the functions that are defined in it."""
    yield code
    for held in code.co_consts:
        if isinstance(held, CodeType):
            yield from _inside(held)


def _multiplies(code: CodeType) -> bool:
    return any(
        step.opname == "BINARY_OP" and step.argrepr in ("@", "@=")
        for step in dis.get_instructions(code)
    )
