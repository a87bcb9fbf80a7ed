"""Attention written out by hand: seen where all that is done can be followed, named elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from regard.calls.watchers import caller, changed, learned, show, unwatched, watched
from regard.errors import RegardError
from regard.traces import Trace
from regard.watching.by_hand.call_sites import call_site
from regard.watching.by_hand.calls import Call
from regard.watching.by_hand.dataflow import Dataflow
from regard.watching.by_hand.look_alikes import SOFTMAXES, LookAlikes, constants, held
from regard.watching.by_hand.products import PRODUCTS
from regard.watching.by_hand.records import LostError, Origin
from regard.watching.by_hand.tensors import plain

STEPS = PRODUCTS | SOFTMAXES
"""The functions that attention by hand begins and ends with."""

FOLDS = frozenset({
    Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.contiguous, torch.reshape, torch.flatten,
})  # fmt: skip
"""Those that may make one axis of batch and heads before, or lay heads before the batch."""
UNKNOWN = "it could not be followed from its scores to its values"
COMPILED = "between its products it is compiled, and compiled graphs cannot be followed"

Beside = Callable[[int, int], bool]
"""Whether a call of so many queries and keys is of interest."""


class Unseen(NamedTuple):
    """Attention that is not seen: where in the code, and why."""

    site: str
    why: str
    origin: Origin | None = None
    """The softmax, if it is known."""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.site, self.why)))


class HandWritten:
    """What a model computes that is attention, by the modules it does it in.

    `where` says which module is running, `wanted` whether its attention is asked for. `attended`
    grows by the paths of those that were followed to the end.
    """

    def __init__(
        self,
        model: nn.Module,
        where: Callable[[], str],
        wanted: Callable[[str], bool],
        attended: set[str],
    ) -> None:
        self.found: dict[str, Unseen] = {}
        """Attention that is not seen, by the paths of modules."""
        self._model, self._where, self._wanted, self._attended = model, where, wanted, attended
        self._flow = Dataflow()
        self._alike = LookAlikes(self._held)
        self._constants: set[int] | None = None
        self._compared: set[str] = set()
        """Where weights were compared with those that the model computed."""
        self.compiled = False
        """Whether a part of the run is compiled."""

    @property
    def followed(self) -> Collection[int]:
        """The tensors that are followed, by identity: empty, and the same object, while there are
        none."""
        return self._flow.followed

    def begin(self) -> None:
        """Nothing of one run belongs to the next."""
        _last.set(_nothing)
        self._flow.clear()
        self._alike.clear()
        self._constants, self.compiled = None, False

    def follows(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether something is called with a tensor that is followed, or may be from now on."""
        return func in FOLDS or self._flow.follows(args, kwargs)

    def step(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        beside: Beside | None = None,
    ) -> Any:
        """One of STEPS was called, or something with a tensor that is followed. The output to go
        on with: its own, whatever comes of following it, unless somebody changes it."""
        again = torch._C._current_graph_task_id() != -1
        if (again and not changed()) or torch._C._get_tracing_state() is not None:
            return out
        seen = None
        try:
            seen = self._followed(func, args, kwargs, out, beside)
        except Exception as error:
            self._note(self._where(), f"following it failed with {type(error).__name__}: {error}")
        return out if seen is None else self._show(*seen, out)

    def _followed(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        beside: Beside | None,
    ) -> tuple[str, Call, Trace] | None:
        if func not in STEPS:
            if self._flow.follows(args, kwargs):
                self._flow.change(func, args, kwargs, out)
            else:
                self._flow.fold(args[0] if args else None, out)
            return None
        if not isinstance(out, Tensor) or out.is_nested or out.layout != torch.strided:
            return None
        path = self._where()
        began = self._alike.step(func, args, kwargs, out, path)
        if func in SOFTMAXES:
            if plain(out):
                self._flow.softmax(args, kwargs, out)
            return None
        found = self._flow.product(func, args, kwargs, out, path)
        if isinstance(found, Call):
            return self._complete(found, path, out, beside)
        if found.sure or (began is not None and not (found.origin and found.origin.seen)):
            why = found.why or (COMPILED if self.compiled else UNKNOWN)
            self._note(shared_path(path if began is None else began, path), why, found.origin)
        return None

    def _complete(
        self, call: Call, path: str, out: Tensor, beside: Beside | None
    ) -> tuple[str, Call, Trace] | None:
        """The attention that was followed to its end, as a trace, if that is of interest."""
        compared = call.weights.scores.compared
        path = shared_path(compared.path, path)
        if held(compared.sides[call.weights.keys].tensor) in self._held():
            return None
        self._alike.clear()
        call.weights.origin.seen = True
        self._forget(call.weights.origin)
        if not watched() or _last.get()() is out:
            return None
        if not self._wanted(path) or (beside is not None and not beside(*call.sizes)):
            self._attended.add(path)
            return None
        try:
            trace = self._traced(call, path)
        except (LostError, RegardError) as error:
            self._note(path, str(error).replace("\n", ";"))
            return None
        return path, call, trace

    def _traced(self, call: Call, path: str) -> Trace:
        if changed() and not call.changeable:
            raise LostError("its output cannot be changed: it has dropout, or more is added to it")
        with torch.set_grad_enabled(torch.is_grad_enabled() and learned()), unwatched():
            trace = call.trace()
        if path not in self._compared:
            if call.differs(trace):
                raise LostError("its weights are not those of the queries and keys it began with")
            self._compared.add(path)
        return trace

    def _show(self, path: str, call: Call, trace: Trace, out: Tensor) -> Tensor:
        module, before = self._model.get_submodule(path), caller.get()
        try:
            caller.set(module)
            shown = show(trace)
        finally:
            caller.set(before)
        if shown is not trace:
            out = call.changed(shown.rows.out, out)
        # Of several who watch, one shows it to all.
        _last.set(ref(out))
        return out

    def _note(self, path: str, why: str, origin: Origin | None = None) -> None:
        self.found.setdefault(path, Unseen(call_site(), why, origin))

    def _forget(self, origin: Origin) -> None:
        """Weights that went into some other product before turn out to be seen."""
        for path in [p for p, unseen in self.found.items() if unseen.origin is origin]:
            del self.found[path]

    def _held(self) -> set[int]:
        if self._constants is None:
            self._constants = constants(self._model)
        return self._constants


def _nothing() -> None:
    pass


_last: ContextVar[Callable[[], Any]] = ContextVar("last", default=_nothing)
"""The output of the attention that was shown last, as long as it is there."""


def shared_path(a: str, b: str) -> str:
    """The module that both paths are in."""
    parts = []
    for x, y in zip(a.split("."), b.split("."), strict=False):
        if x != y:
            break
        parts.append(x)
    return ".".join(parts)
