"""The kernels as operators of torch.library."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from jaxtyping import Int
from torch import Tensor

from regard.backends import inference_operators
from regard.backends.called_forms import Held, Way
from regard.backends.contract import Repeated, Rows
from regard.backends.operators import register
from regard.backends.passes import Given, Moved, Passes, Pull
from regard.backends.tiled.forward import forward as tiled_forward
from regard.backends.tiled.jvp import jvp
from regard.backends.triton import cudnn
from regard.backends.triton.additive import passes as additive
from regard.backends.triton.arguments import on_card
from regard.backends.triton.backward import backward
from regard.backends.triton.forward import empty_out, forward
from regard.backends.triton.layout import is_simple
from regard.backends.triton.replay import training
from regard.backends.triton.replay.operated import Replayed
from regard.backends.triton.replay.passes import RepeatedBackward, RepeatedForward
from regard.backends.triton.settings.tuning import BY_CUDNN, trained_by_cudnn
from regard.inputs import AttentionInputs, drawn_seed
from regard.scores.comparison import TanhSum


def _forward(x: AttentionInputs, *, statistics: bool) -> tuple[Rows, Tensor]:
    with on_card(x.q):
        if isinstance(x.comparison, TanhSum):
            return additive.forward(x, statistics=statistics)
        return forward(x, statistics=statistics)


def _backward(x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull, *, bias: bool) -> Given:
    with on_card(x.q):
        if isinstance(x.comparison, TanhSum):
            return additive.backward(x, rows, kept, pull)
        return backward(x, rows, kept, pull, bias=bias)


def _jvp(
    x: AttentionInputs, rows: Rows, kept: Tensor, moved: AttentionInputs, *, statistics: bool
) -> Moved:
    """There is no kernel for forward-mode derivatives: PyTorch's operations loop over the tiles.
    Logits and log-sum-exp must be rounded alike, so these compute the rows too."""
    return jvp(x, tiled_forward(x, statistics=statistics), moved, statistics=statistics)


def _kept(lse: Tensor) -> Tensor:
    return lse.new_empty(2, *lse.shape)


_passes = Passes("triton", _forward, _backward, _jvp)
_run, _learning, _differentiable = register(_passes, _kept, empty_out, inside=Replayed(_passes))
_run_listed, *_ = register(_passes, _kept, empty_out, reads=True)


def run(x: AttentionInputs, *, statistics: bool) -> Rows:
    """The forward pass, differentiable. Where a mask is given by lists of tiles, these are made on
    the host, and kept: a CUDA graph would go on with old lists, and have them in its memory."""
    if inference_operators.fits(x):
        return _inference(x, statistics)
    return (_run if is_simple(x.mask) else _run_listed)(x, statistics=statistics)


def repeated(inputs: AttentionInputs, *, statistics: bool) -> Repeated:
    """Further calls of a kind: the launches of the first, with other addresses."""
    if inputs.dropout:
        return _dropping(inputs, statistics=statistics)
    rest, learned = inputs.beside_tensors(), inputs.needs_grad
    attend = RepeatedForward(_passes, rest, statistics, keeps=learned)
    pull = RepeatedBackward(_passes)
    way = Way(attend, pull, Held(inputs))

    def again(q: Tensor, k: Tensor, v: Tensor) -> Rows | Tensor:
        if learned:
            rows = _learning(way, rest, q, k, v)
            return rows if statistics else rows.out
        return attend(q, k, v)[0] if statistics else attend.output(q, k, v)

    if not learned or not training.AVAILABLE:
        return again
    if statistics and cudnn.runs_output_backward(inputs) and inputs.sink is None:
        return training.TrainedTrace(attend, pull, _differentiable, again, _learning)
    if not statistics and trained_by_cudnn(inputs):
        by_cudnn = RepeatedForward(_passes, rest, statistics, keeps=False, how=BY_CUDNN)
        return training.Trained(by_cudnn, pull, _differentiable, again)
    return again


def _dropping(inputs: AttentionInputs, *, statistics: bool) -> Repeated:
    """The same with dropout: each call has a seed of its own, which is drawn unless it is given."""
    learned, first = inputs.needs_grad, inputs.beside_tensors()
    attend = RepeatedForward(_passes, first, statistics, keeps=learned)
    pull, held = RepeatedBackward(_passes), Held(inputs)

    def again(
        q: Tensor, k: Tensor, v: Tensor, seed: Int[Tensor, ""] | None = None
    ) -> Rows | Tensor:
        seed = drawn_seed() if seed is None else seed
        number = int(seed)
        if not learned:
            return attend(q, k, v, number)[0] if statistics else attend.output(q, k, v, number)
        way = Way(partial(attend, seed=number), pull, held)
        rows = _learning(way, replace(inputs, seed=seed).beside_tensors(), q, k, v)
        return rows if statistics else rows.out

    return again


_inference = inference_operators.register("triton", _run, repeated, empty_out)
