"""Watching a model: which module is running, and what its attention does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from regard.calls.watchers import Columns, begin, caller, end
from regard.errors import RegardError, RegardWarning
from regard.seen import Seen
from regard.traces import Trace
from regard.transforms import under_torch_func
from regard.watching.choices import Heads, Keep, Layers, check, matches, numbers, patterns
from regard.watching.followed_modules import FollowedModules
from regard.watching.followed_run import FollowedRun
from regard.watching.gaps import Gaps
from regard.watching.graph_breaks import uncompiled
from regard.watching.interrupted import Settings, put_modes_back, was_interrupted
from regard.watching.kept import KeptCalls, held_by_autograd
from regard.watching.module_calls import UNFINISHED
from regard.watching.pytorch import AttentionMode, FastPath, refuse_on_ranks, replaced
from regard.watching.reach import Reach, needs_asking, never_attends
from regard.watching.registration import imported_huggingface
from regard.watching.transformed_calls import MAPPED, take_transformed


class Watch:
    """A model being watched, between `attach` and `detach` or inside a `with`."""

    changes = False
    """Whether `see` gives outputs that stand in the place of others."""
    beside: Callable[[int, int], bool] | None = None
    """Whether a call of PyTorch's attention, of so many queries and keys, is to be traced. If this
    can be asked, such calls are only ever looked at from beside: all outputs are PyTorch's own."""
    columns: Columns | None = None
    """What numbers of keys are mixed beside the values of a call that is about to run."""

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        heads: Heads,
        keep: Keep,
        every: int,
        spill: str | os.PathLike[str] | None = None,
        tokenizer: Any = None,
        gradients: bool = False,
    ) -> None:
        self.model, self.layers, self.heads = model, patterns(layers), numbers(heads)
        self.keep, self.every, self.gradients = keep, every, gradients
        self._kept = KeptCalls(model, self._wanted, keep, spill, tokenizer)
        self.seen = self._kept.seen
        self._run = FollowedRun()
        self._running = self._run.paths
        self._runs = 0
        self._learns = False
        """Whether the run that is followed began with autograd on."""
        self._looking = self._started = False
        """Whether the run that is followed is one to look at, and whether that began."""
        self._settings: Settings | None = None
        """What PyTorch's settings were when that began."""
        self._reach = Reach()
        self._gaps = Gaps(model, self.layers, lambda: self._running[-1])
        self._fast_path = FastPath(model)
        self._switch: Any = None
        self._active: AttentionMode | None = None
        self._modules = FollowedModules()
        self._known: set[str] = set()
        """Of those whose attention said by itself whose it is."""
        self._unlisten: Callable[[], None] = _nothing

    def attach(self) -> Seen:
        """Start watching. What is seen grows in the returned value.

        Runs of the model are seen in whatever thread it runs, one at a time. Inside a `with` only
        those are that the thread or task makes which is in it."""
        return self._attach(everywhere=True)

    def _attach(self, *, everywhere: bool) -> Seen:
        if self._modules:
            raise RegardError("this watch is attached already", do="detach() it first")
        self._run.everywhere, self._run.elsewhere = everywhere, 0
        huggingface, modules = imported_huggingface(), list(self.model.named_modules())
        every = [module for _, module in modules]
        self._gaps.begin(every)
        if huggingface is None:
            self._refuse_others()
            asks = needs_asking(every)
            self._reach = Reach(every, asks=asks)
        else:
            self._switch = huggingface.Switch(modules)
            self._refuse_others()
            switched = self._switch.configs
            asks = huggingface.needs_asking(every, switched)
            islands = huggingface.islands(modules, switched) if asks else ()
            self._reach = Reach(every, asks=asks, islands=islands)
        try:
            self._unlisten = self._kept.start(self.model)

            def silent(module: nn.Module) -> bool:
                theirs = huggingface is not None and huggingface.never_attends(module)
                return theirs or never_attends(module)

            self._modules.follow(
                modules, self, silent=silent, scripted=self._gaps.is_scripted,
                islands=self._reach.islands, asks=asks,
            )  # fmt: skip
            self._reach.count_hooks()
            if not everywhere:
                # In here: who is interrupted as a `with` begins has nothing to end.
                self._run.expect_here()
        except BaseException:
            self._leave_alone()
            self._kept.drop()
            raise
        return self.seen

    def detach(self) -> None:
        """Stop watching, leave the model as it was, and finish the file of traces, if any. What
        attended and was not seen is named in a warning."""
        attached = bool(self._modules)
        self._leave_alone()
        self._kept.settle()
        if attached and self._runs:
            self._warn_of_gaps()
        if attached:
            self._kept.finish()

    def _leave_alone(self) -> None:
        self._run.leave_here()
        self._modules.leave_alone(self)
        self._known.clear()
        self._reach.forget_modules()
        self._unlisten()
        self._unlisten = _nothing
        if self._run.is_here():
            self._stop()

    def __enter__(self) -> Seen:
        return self._attach(everywhere=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        whole = False
        try:
            try:
                self._leave_alone()
            except BaseException:
                # Again, because an interrupt may have come in the middle of it.
                self._leave_alone()
                raise
            if error is None:
                self._kept.settle()
                if self._runs:
                    self._refuse_gaps()
                else:
                    self._run.refuse_elsewhere(type(self.model).__name__)
            whole = error is None
        finally:
            self._kept.finish() if whole else self._kept.drop()

    def _refuse_gaps(self) -> None:
        """Nothing that ran and attended may be missing from what was seen."""
        self._gaps.refuse(self.seen, self._runs, imported_huggingface())

    def _warn_of_gaps(self) -> None:
        missed = self._gaps.missed(imported_huggingface())
        if missed:
            text = "attention layers ran, but their attention was not seen: " + ", ".join(missed)
            warnings.warn(RegardWarning(text), stacklevel=3)

    def _wanted(self, path: str) -> bool:
        return matches(path, self.layers)

    @uncompiled
    def knows(self, path: str) -> bool:
        """Whether the attention of a module says by itself whose it is, in a run that is followed
        here: so it was before. A mode that is on by now may see more in there."""
        return path in self._known and self._active is None and self._run.is_here()

    @uncompiled
    def depth(self) -> int:
        """How many modules are running in this thread."""
        return self._run.depth()

    @uncompiled
    def enter(
        self,
        path: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        compiled: bool = False,
    ) -> None:
        """A module begins to run."""
        again = _runs_again()
        if not self._run.enter(path, again):
            return
        if len(self._running) == 1:
            self._begin(args, kwargs, again, compiled)
        if compiled:
            self._gaps.by_hand.compiled = True
        if self._looking and not again:
            self._gaps.ran.add(path)
        if self._active is not None:
            self._fast_path.enter(path, module, args, kwargs)
            # A compiled model would not know of who watches.
            if path in self._reach.islands and not compiled:
                self._active.pause()

    def _begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool, compiled: bool
    ) -> None:
        if not again:
            self._read_inputs(args, kwargs)
            self._looking = self._due()
            self._learns = torch.is_grad_enabled()
            self._runs += 1
        if self._looking:
            self._refuse_others()
            # A mode is also what the compiler knows somebody who watches by.
            self._start(asks=self._reach.asks() or compiled)

    def _read_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._kept.read_inputs(args, kwargs)

    @uncompiled
    def leave(self, path: str, depth: int, output: Any) -> None:
        """A module has run, or failed, or was interrupted."""
        if not self._run.is_here():
            self._run.leave_aside(depth)
            return
        if depth and self._active is None:
            del self._running[depth:]
            return
        try:
            nested = self._fast_path.leave(path)
            if nested is not None and self._active is not None and output is not UNFINISHED:
                self._active.nested_multi_head(*nested)
        finally:
            del self._running[depth:]
            if self._running and self._active is not None and path in self._reach.islands:
                self._active.go_on()
            if not self._running:
                if output is UNFINISHED:
                    # Nothing is missing from what did not come to its end.
                    self._gaps.ran.clear()
                    self._put_back()
                self._stop()

    def see(self, trace: Trace) -> Tensor | None:
        """Note a call of the module that is running."""
        if _runs_again() or not self._running:
            return None
        path = self._caller()
        if self.layers is not None and not self._wanted(path):
            return None
        if self.gradients:
            self._refuse_untied(path)
        if not under_torch_func():
            self._take(path, trace)
        elif not take_transformed(trace, partial(self._take, path), learns=self.gradients):
            self._gaps.left_alone.setdefault(path, MAPPED)
        return None

    def _caller(self) -> str:
        """The path of the module whose call is shown."""
        path, module = self._running[-1], caller.get()
        if module is not None:
            path = self._modules.paths.get(id(module), path)
            # Where a mode is on, it has to know where it is.
            if self._active is None and path:
                self._known.add(path)
        self._gaps.attended.add(path)
        return path

    def _refuse_untied(self, path: str) -> None:
        """A part that runs without autograd would give a loss no gradients, without a word."""
        if self._learns and not torch.is_grad_enabled():
            raise RegardError(
                "gradients=True: a layer ran without autograd inside a model that ran with it",
                got=f"{path or '(model)'} under torch.no_grad(), as checkpoint(use_reentrant=True) "
                "runs its layers",
                do="use checkpoint(use_reentrant=False), or name the other layers in layers=",
            )

    def _refuse_others(self) -> None:
        """Whose attention is not PyTorch's or transformers' own would be put aside by ours; or, on
        one of several ranks, may call PyTorch's for parts of what it computes."""
        who = replaced()
        if self._switch is not None:
            self._switch.refuse_others(who)
        if who is not None:
            refuse_on_ranks(who)

    def _due(self) -> bool:
        """Whether the run of the model that begins is looked at."""
        return self._runs % self.every == 0

    def _take(self, path: str, trace: Trace) -> None:
        """Keep a call; who watches for something else takes that of it."""
        held = held_by_autograd(trace)
        # What only adds up takes no part in autograd, and leaves the trace to its call.
        if not self.gradients and (self.keep == "traces" or self.heads is not None):
            trace = trace.detach()
        if self.heads is not None:
            trace = trace[:, list(self.heads)]
        self._kept.take(path, trace, self._runs - 1, held=held)

    def _start(self, *, asks: bool) -> None:
        self._settings = Settings()
        self._started = True
        if self._switch is not None:
            self._switch.on()
        if asks:
            by_hand = self._gaps.by_hand
            by_hand.begin()
            self._active = AttentionMode(
                lambda: self._running[-1], self._wanted, by_hand, self._leave_call, self.beside
            )
            self._active.__enter__()
        begin(self.see, learns=self.gradients, changes=self.changes, columns=self.columns)

    def _leave_call(self, why: str) -> None:
        self._gaps.left_alone.setdefault(self._running[-1], why)

    def _stop(self) -> None:
        """The run is over. All of this may be done twice: an interrupt may come in between."""
        active = self._active
        try:
            if active is not None and active.deferred is not None:
                active.pause()
                self._look_at_deferred()
        except BaseException:
            # As of a module that did not come to its end.
            self._gaps.ran.clear()
            self._put_back()
            raise
        finally:
            self._leave_run(active)

    def _put_back(self) -> None:
        """What an error kept PyTorch from putting back."""
        put_modes_back()
        if self._settings is not None and was_interrupted():
            self._settings.put_back()

    def _look_at_deferred(self) -> None:
        """Look at the calls that wait, each as one of the module that made it."""
        active, running = self._active, list(self._running)
        if active is None or active.deferred is None:
            return
        try:
            for call in active.deferred.taken():
                self._running[:] = [call.path]
                if active.deferred.holds(call):
                    active.look_at(call)
        finally:
            self._running[:] = running

    def _leave_run(self, active: AttentionMode | None) -> None:
        end(self.see)
        self._fast_path.end()
        if active is not None:
            if active.deferred is not None:
                active.deferred.drop()
            active.__exit__()
            self._active = None
        if self._switch is not None:
            self._switch.off()
        self._running.clear()
        try:
            # While no other thread's run is followed, which would add to it.
            if self._started:
                self._started = False
                self._rest()
                self._kept.forget_shared()
        except BaseException:
            self._put_back()
            raise
        finally:
            self._settings = None
            self._run.thread = None

    def _rest(self) -> None:
        """A run that was looked at is over."""
        self._kept.rest()


def _nothing() -> None:
    pass


def _runs_again() -> bool:
    """What runs during the backward pass runs again: gradient checkpointing."""
    return torch._C._current_graph_task_id() != -1


def watch(
    model: nn.Module,
    *,
    layers: Layers = None,
    heads: Heads = None,
    keep: Keep = "statistics",
    every: int = 1,
    spill: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    gradients: bool = False,
) -> Watch:
    """Look into every attention layer of a model while it runs.

    `layers` are paths of modules (`*` matches anything), `heads` their numbers; one or several, all
    by default. `keep="statistics"` adds up a few numbers per head; `keep="traces"` keeps each
    call's queries, keys and values as well, so that any weight can be asked for. `every=10` looks
    at every tenth forward pass. `spill` is the path of a trace file: traces are written there
    as they come instead of being held in memory, and read from it once the watching has ended. With
    a `tokenizer`, `seen.tokens` are the texts of the tokens that the model was given.

    With `gradients=True`, which needs `keep="traces"`, traces stay in autograd's graph: a loss on
    their answers trains the model. They hold that graph until they are freed, with `seen` or by
    `seen.clear()`. Without it they are detached.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    >>> with regard.watch(model, keep="traces") as seen:
    ...     y = model(torch.randn(2, 5, 16))
    >>> seen["self_attn"].trace.weights().shape
    torch.Size([2, 4, 5, 5])
    """
    check(model, keep, every, spill, tokenizer, gradients)
    return Watch(model, layers, heads, keep, every, spill, tokenizer, gradients)
