"""The calls of a model's modules, with whoever watches told before and after each.

PyTorch's hooks do not run when somebody presses Ctrl-C, and travel with copies of a module. What
`nn.Module` calls when it was compiled in place does neither: it is a function like any other, which
can say `finally`, and PyTorch itself leaves it out of copies and files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.nn.modules.module import _has_any_global_hook

from regard.watching.graph_breaks import stepped_over, uncompiled

_CALL, _STATE, _REPLICA = "_compiled_call_impl", "__getstate__", "_replicate_for_data_parallel"
changing = threading.RLock()
"""Held while such calls are put into modules and taken out."""

UNFINISHED = object()
"""In the place of the output of a module that failed or was interrupted."""


@runtime_checkable
class Follower(Protocol):
    """Who is told which modules run. Each is told of the end of what it was told the beginning of,
    however that ended, and perhaps twice. The compiler must leave its methods alone."""

    def knows(self, path: str) -> bool:
        """Whether there is nothing to tell of a module: a run is followed that it is a part of, and
        what it does is told otherwise."""

    def depth(self) -> int:
        """How many modules are running around the one that is about to."""

    def enter(
        self,
        path: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        compiled: bool = False,
    ) -> None:
        """A module begins to run. `compiled`: what it calls is compiled."""

    def leave(self, path: str, depth: int, output: Any) -> None: ...


@runtime_checkable
class Yielding(Protocol):
    """Who rather sees nothing than have a model end that cannot be looked into."""

    def yields(self, error: Exception) -> bool:
        """The compiler refused to make one graph of a module, before any of it ran. Whether the
        model is left alone from here on, so that it can be called again."""


class OwnCall:
    """What stands in the place of a module's own call, and is not seen by who copies or saves the
    module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.compiled: Callable[..., Any] | None = module._compiled_call_impl
        """What `module.compile()` had put in this place."""
        # Here first and gone last: another thread may take a copy at any moment.
        vars(module)[_STATE] = _State(self, module)
        vars(module)[_REPLICA] = _Replica(self, module)
        vars(module)[_CALL] = self

    def close(self) -> None:
        """Leave the module as it was."""
        here = vars(self.module)
        for name, kind in ((_CALL, OwnCall), (_REPLICA, _Replica), (_STATE, _State)):
            if isinstance(here.get(name), kind):
                del here[name]
        if self.compiled is not None and _CALL not in here:
            here[_CALL] = self.compiled

    def __deepcopy__(self, memo: Any) -> None:
        """It does not travel, even where a class copies all that it holds by itself."""

    def __reduce__(self) -> Any:
        return type(None), ()


class Entrance(OwnCall):
    """A module's own call, followed by those who watch."""

    def __init__(self, module: nn.Module) -> None:
        self.followers: tuple[tuple[Follower, str], ...] = ()
        super().__init__(module)
        # The compiler calls the forward of modules past their call, and PyTorch's encoders take
        # their fast path, unless there are hooks.
        module.register_forward_hook(_does_nothing)

    @stepped_over
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, output = self.module, UNFINISHED
        # Asked here: where the compiler leaves everything alone it is not there.
        compiled = eval_frame.get_eval_frame_callback() not in (None, False)
        call: Any = module._call_impl if self.compiled is None else self.compiled
        if len(self.followers) == 1:
            # As below, in fewer steps: this is what every layer goes through.
            ((who, path),) = self.followers
            if who.knows(path):
                call = module.forward if not compiled and self._is_plain() else call
                return call(*args, **kwargs)
            depth = who.depth()
            try:
                who.enter(path, module, args, kwargs, compiled=compiled)
                output = call(*args, **kwargs)
                return output
            except Exception as error:
                if compiled or not self._is_yielded(error):
                    raise
                output = call(*args, **kwargs)
                return output
            finally:
                # An interrupt may come in here too; there is seldom a second one.
                try:
                    who.leave(path, depth, output)
                except BaseException:
                    who.leave(path, depth, UNFINISHED)
                    raise
        following = self._following()
        try:
            _enter(following, module, args, kwargs, compiled)
            output = call(*args, **kwargs)
            return output
        except Exception as error:
            if compiled or not self._is_yielded(error):
                raise
            output = call(*args, **kwargs)
            return output
        finally:
            try:
                _leave(following, output)
            except BaseException:
                _leave(following, UNFINISHED)
                raise

    @uncompiled
    def _is_plain(self) -> bool:
        """Whether a call of the module is one of its forward, and nothing but our hook."""
        here = vars(self.module)
        hooks = here["_forward_hooks"]
        return (
            self.compiled is None
            and len(hooks) == 1
            # Whoever clears a module's hooks clears ours, and may put one of theirs there.
            and next(iter(hooks.values())) is _does_nothing
            and not here["_forward_pre_hooks"]
            and not here["_backward_hooks"]
            and not here["_backward_pre_hooks"]
            and not _has_any_global_hook()
            and torch._C._get_tracing_state() is None
        )

    @uncompiled
    def _is_yielded(self, error: Exception) -> bool:
        """Whether the compiler refused this module as one graph because it is followed, and all who
        follow it gave way. (By name: to import the compiler takes long.)"""
        one = self.compiled is not None or "dynamo_ctx" in vars(self.module)
        if not one or type(error).__module__ != "torch._dynamo.exc":
            return False
        followers = self.followers
        yielding = [who for who, _ in followers if isinstance(who, Yielding)]
        return len(yielding) == len(followers) and all(who.yields(error) for who in yielding)

    @uncompiled
    def _following(self) -> list[tuple[Follower, str, int]]:
        return [(who, path, who.depth()) for who, path in self.followers]

    def close(self) -> None:
        # Not by its handle, which an interrupt may have lost.
        hooks = self.module._forward_hooks
        for key in [key for key, hook in list(hooks.items()) if hook is _does_nothing]:
            del hooks[key]
        super().close()


class _OfModule:
    """What stands in the place of a method of a module."""

    def __init__(self, own: OwnCall | None, module: nn.Module) -> None:
        self.own, self.module = own, module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Where a class copies all that it holds by itself, as a parametrized one does: that of
        the copy, which nobody follows."""
        return type(self)(None, memo[id(self.module)]) if id(self.module) in memo else None


class _State(_OfModule):
    """What a module gives to be copied or saved."""

    def __call__(self) -> Any:
        state = type(self.module).__getstate__(self.module)
        return _without(state) if isinstance(state, dict) else state


class _Replica(_OfModule):
    """What nn.DataParallel runs in its threads: the call of the module it was made of would run
    that one."""

    def __call__(self) -> nn.Module:
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        replica.__dict__ = _without(vars(replica))
        return replica


_NOTHING = object()


def _without(state: dict[str, Any]) -> dict[str, Any]:
    """What a module holds, less what watching put there."""
    # Whole in one call, since another thread may attach or detach meanwhile.
    left = dict(state)
    for name in (_CALL, _STATE, _REPLICA):
        left.pop(name, None)
    for name, held in left.items():
        if hasattr(held, "instead_of"):
            left[name] = held.instead_of
    left = {name: held for name, held in left.items() if held is not _NOTHING}
    hooks = left.get("_forward_hooks")
    if hooks:
        left["_forward_hooks"] = type(hooks)(
            (key, hook) for key, hook in list(hooks.items()) if hook is not _does_nothing
        )
    return left


def stays(function: Any, instead_of: Any = _NOTHING) -> Any:
    """A function that is put into a module and does not travel with it."""
    function.instead_of = instead_of
    return function


def follow(module: nn.Module, who: Follower, path: str) -> None:
    """Tell `who` of each call of a module from now on."""
    with changing:
        entrance = own_call(module)
        stands = vars(module).get(_CALL) is entrance
        if not isinstance(entrance, Entrance) or not stands:
            if entrance is not None:
                entrance.close()
            entrance = Entrance(module)
        entrance.followers += ((who, path),)


def leave_alone(module: nn.Module, who: Follower) -> None:
    """Tell `who` nothing any more, whether it was told or not."""
    with changing:
        entrance = own_call(module)
        if isinstance(entrance, Entrance):
            entrance.followers = tuple(pair for pair in entrance.followers if pair[0] is not who)
            if not entrance.followers:
                entrance.close()


def own_call(module: nn.Module) -> OwnCall | None:
    """What watching put in the place of a module's call, also if somebody compiled the module in
    place since."""
    state = vars(module).get(_STATE)
    return state.own if isinstance(state, _State) else None


def compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    call = module._compiled_call_impl
    return (call.compiled if isinstance(call, OwnCall) else call) is not None


@uncompiled
def _enter(
    following: list[tuple[Follower, str, int]],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    compiled: bool,
) -> None:
    for who, path, _ in following:
        who.enter(path, module, args, kwargs, compiled=compiled)


@uncompiled
def _leave(following: list[tuple[Follower, str, int]], output: Any) -> None:
    # In the order they came: what the first one still shows, the others see.
    for who, path, depth in following:
        who.leave(path, depth, output)


def _does_nothing(*_: object) -> None:
    pass
