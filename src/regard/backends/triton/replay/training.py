"""Training by cuDNN inside PyTorch's own autograd.

A function of autograd that is written in Python makes the GPU wait: for short texts, reaching
cuDNN's backward pass takes longer than that pass. The node that PyTorch makes for its own operator
calls it at once. What a hidden NaN may have spoilt is mended behind either pass, while it runs.

The node does not ask who computed the output and the log-sum-exp that it keeps. So a trace, whose
forward pass is not cuDNN's, has such a node too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch import pyfunctorch

from regard.backends import cudnn_plans
from regard.backends.called_forms import (
    Differentiable,
    Held,
    Learning,
    Overwritten,
    Way,
    asks_for_more,
)
from regard.backends.contract import LearnedRows, Repeated, Rows
from regard.backends.passes import Pull
from regard.backends.triton import cudnn
from regard.backends.triton.captures import capturing
from regard.backends.triton.replay.passes import RepeatedBackward, RepeatedForward
from regard.backends.triton.replay.steps import Fresh, Step, launch_again, made
from regard.errors import RegardError
from regard.inputs import AttentionInputs, in_memory

_CURRENT: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)
_HOOKS: Callable[[bool], Any] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)
AVAILABLE = _CURRENT is not None and _HOOKS is not None
"""They are private to PyTorch: the node that runs, and hooks on the tensors that nodes save."""
_NO_TRANSFORMS: Callable[[], AbstractContextManager[Any]] = getattr(
    pyfunctorch, "temporarily_clear_interpreter_stack", nullcontext
)


class Trained:
    """Further calls of a kind that learns q, k or v, and of which the output alone is wanted."""

    def __init__(
        self,
        attend: RepeatedForward,
        pull: RepeatedBackward,
        differentiable: Differentiable,
        otherwise: Repeated,
    ) -> None:
        self.attend, self.pull = attend, pull
        """The passes: the forward pass with what mends it, and cuDNN's backward pass."""
        self.differentiable = differentiable
        self.otherwise = otherwise
        """Runs calls for which this is not the way."""
        self.fits: bool | None = None
        """None until a call has shown it."""
        self.mending: tuple[list[Fresh | None], list[Step]] | None = None
        """What mends gradients, once a backward pass has shown it."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Rows | Tensor:
        # Hooks on what nodes save would be given the output before it is mended.
        if self.fits is False or _HOOKS is None or _HOOKS(False) is not None:
            return self.otherwise(q, k, v)
        if self.fits is None:
            if capturing():
                return self.otherwise(q, k, v)
            self.fits = self._found_to_fit(q, k, v)
            return self(q, k, v)
        return self._run(q, k, v)

    def _run(self, q: Tensor, k: Tensor, v: Tensor) -> Rows | Tensor:
        out = self.attend.output(q, k, v)
        self._watch(out)
        return out

    def _watch(self, out: Tensor) -> None:
        """Have the gradients of an output mended."""
        node = out.grad_fn
        assert node is not None
        cudnn_plans.lay_gradients_like(out)
        # It holds no tensor: those that it needs are the node's, which lets go of them in time.
        node.register_hook(self._mended)

    def _found_to_fit(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        with torch.no_grad():
            self.attend(q, k, v)
        if self.attend.replay is None:
            return False
        rows = self._rows(q, k, v)
        like_queries = cudnn_plans.lies_like_queries(rows.out, q)
        return like_queries and cudnn_plans.shows_what_it_keeps(rows.out, rows.lse)

    def _rows(self, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        """Rows whose output has PyTorch's node."""
        return self.attend(q, k, v)[0]

    def _mended(
        self, found: Sequence[Tensor | None], given: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None] | None:
        """What the node found for q, k and v, given the gradient of the output."""
        assert _CURRENT is not None
        g_out = given[0]
        if g_out is None:
            return None
        node = _CURRENT()
        if node is None:
            raise RegardError(
                "compiled autograd runs the backward pass of an attention that was not compiled",
                accepted="PyTorch's own autograd, or a compiled forward pass",
                do='compile the model too, or ask for backend="tiled"',
            )
        saved = cudnn_plans.kept_by(node)
        more = asks_for_more((g_out,))
        if not more:
            g_out = in_memory(g_out)
            if self._mended_in_place(saved, g_out, found):
                return None
        q, k, v, out, lse = saved
        x = AttentionInputs(q, k, v, *self.attend.rest)
        nothing = lse.new_empty(0)
        rows, pull = Rows(out, lse.squeeze(-1), nothing, nothing), Pull(g_out, None, None)
        better: Sequence[Tensor]
        if more:
            better = self.differentiable(x, rows, nothing, pull)
        else:
            better = self.pull(x, rows, nothing, pull)
            self.mending = self.pull.mending(x, rows, nothing, pull)
            if self.mending is not None and not _alike(found, self.mending[0]):
                self.mending = None
        wanted = (new if old is not None else None for new, old in zip(better, found, strict=False))
        return *wanted, *found[3:]

    def _mended_in_place(
        self, saved: tuple[Tensor, ...], g_out: Tensor, found: Sequence[Tensor | None]
    ) -> bool:
        # All that may differ within a kind: hooks of others may have laid the gradient out anew.
        if self.mending is None or torch.are_deterministic_algorithms_enabled():
            return False
        if g_out.data_ptr() % 16 or not cudnn_plans.has_strides(g_out, saved[3].stride()):
            return False
        fresh, steps = self.mending
        if not steps:
            return True
        # Nobody wants some of them, perhaps: what is written there is lost.
        own = [
            t if t is not None else made((part,), g_out.device)[0]
            for t, part in zip(found, fresh, strict=False)
        ]
        launch_again(steps, (*saved, None, g_out, *own))
        return True


class TrainedTrace(Trained):
    """The same of calls of which statistics are wanted too, whose forward pass is ours."""

    def __init__(
        self,
        attend: RepeatedForward,
        pull: RepeatedBackward,
        differentiable: Differentiable,
        otherwise: Repeated,
        learning: Learning,
    ) -> None:
        super().__init__(attend, pull, differentiable, otherwise)
        self.learning = learning
        self.join: cudnn.Join | None = None
        """Gives an output its node, once a call has been looked at."""
        self.learns_statistics = False
        """Whether a loss of statistics was met: of such calls one pass finds all gradients, and the
        next are run so."""

    def _run(self, q: Tensor, k: Tensor, v: Tensor) -> Rows | Tensor:
        if self.learns_statistics:
            return self.otherwise(q, k, v)
        found, kept = self._joined(q, k, v)
        self._watch(found.out)
        versions = [t._version for t in (q, k, v, found.out)]

        def joined() -> Rows:
            changed = versions != [t._version for t in (q, k, v, found.out)]
            held = Overwritten() if changed else Held(AttentionInputs(q, k, v, *self.attend.rest))
            with _as_behind_the_call():
                alone = found.map(Tensor.detach)
                way = Way(lambda *_: (alone, kept), self._pulled, held)
                return self.learning(way, self.attend.rest, q, k, v)

        return LearnedRows(found, joined)

    def _rows(self, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        self.join = cudnn.joining(AttentionInputs(q, k, v, *self.attend.rest))
        return self._joined(q, k, v)[0]

    def _joined(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Rows, Tensor]:
        assert self.join is not None
        found, kept = self.attend(q, k, v)
        self.join(found.out, found.lse, q, k, v)
        return found, kept

    def _pulled(self, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull) -> Sequence[Tensor]:
        """Gradients of statistics alone."""
        self.learns_statistics = True
        return self.pull(x, rows, kept, pull)


@contextmanager
def _as_behind_the_call() -> Iterator[None]:
    """Without what has been entered since and ends sooner than a trace may: hooks on what nodes
    save, as of a checkpoint, transforms of `torch.func`, and modes without gradients."""
    autograd: Any = torch._C._autograd
    hooks = []
    assert _HOOKS is not None
    try:
        while (top := _HOOKS(False)) is not None:
            hooks.append(top)
            autograd._pop_saved_tensors_default_hooks()
        with _NO_TRANSFORMS(), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def _alike(found: Sequence[Tensor | None], fresh: Sequence[Fresh | None]) -> bool:
    """Whether gradients that were found lie like those that launches were recorded for."""
    return all(
        t is None or (part is not None and t.stride() == part.strides)
        for t, part in zip(found[:3], fresh, strict=False)
    )
