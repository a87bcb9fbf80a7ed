"""cuDNN's passes, where they compute the same as ours and are faster.

Its backward pass needs only our output and log-sum-exp. Both include a sink, which has no value:
cuDNN knows of none, and that changes no gradient but the sink's own. Its forward pass keeps no
statistics, so it serves calls that ask for none. Both let a masked NaN reach other rows of its
tile: the caller repairs those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from regard.backends import cudnn_plans
from regard.backends.contract import Rows
from regard.backends.passes import Pull
from regard.backends.triton.arguments import describable, generation
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot


def runs_forward(x: AttentionInputs) -> bool:
    """Whether cuDNN's forward pass computes the output of a call."""
    return x.sink is None and _fits(x) and cudnn_plans.knows_forward()


def runs_backward(x: AttentionInputs, pull: Pull) -> bool:
    """Whether cuDNN's backward pass computes the gradients of a call."""
    only_output = pull.out is not None and pull.lse is None and pull.entropy is None
    return only_output and runs_output_backward(x)


def runs_output_backward(x: AttentionInputs) -> bool:
    """Whether it computes those of a call of which only the output is used."""
    return (
        # Its sums have no fixed order.
        not torch.are_deterministic_algorithms_enabled()
        and _fits(x)
        and cudnn_plans.knows_backward()
    )


def scale_and_causal(x: AttentionInputs) -> tuple[float, bool]:
    """The scale of a call, and whether it is causal."""
    assert isinstance(x.comparison, Dot)
    return float(x.comparison.scale), x.mask is not None


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The output, in memory like the queries, and the log-sum-exp."""
    out, lse = cudnn_plans.attend(q, k, v, scale, causal)
    return out, lse.squeeze(-1).contiguous()


Join = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def joining(x: AttentionInputs) -> Join:
    """Makes outputs of calls like this one, with their log-sum-exp and q, k and v, outputs of
    cuDNN's forward pass to autograd: their backward pass is cuDNN's."""
    scale, causal = scale_and_causal(x)
    return partial(cudnn_plans.join, scale=scale, causal=causal, nothing=_kept_nothing(x.q.device))


def backward(x: AttentionInputs, rows: Rows, g_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    scale, causal = scale_and_causal(x)
    lse, nothing = rows.lse.unsqueeze(-1), _nothing(x.q.device)
    return cudnn_plans.pull(g_out, x.q, x.k, x.v, rows.out, lse, scale, causal, nothing)


def _nothing(device: torch.device) -> Tensor:
    """In the place of dropout's seed and offset, which are not read where nothing is dropped."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros((), dtype=torch.int64, device=device)
    return _kept_nothing(device)


@cache
def _kept_nothing(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def _fits(x: AttentionInputs) -> bool:
    return (
        isinstance(x.comparison, Dot)
        and x.comparison.scale > 0
        and x.q.dtype in (torch.bfloat16, torch.float16)
        and x.bias is None
        and x.softcap is None
        and not x.dropout
        and all(t.shape[-1] % 8 == 0 and t.shape[-1] <= 256 for t in (x.q, x.v))
        and (x.mask is None or is_plainly_causal(x))
        and min(x.shape.Q, x.shape.K) >= 128
        and generation(x.q.device) >= 9
        and (x.q.is_meta or torch.backends.cudnn.is_available())
        and all(describable(t) for t in (x.q, x.k, x.v))
    )


def is_plainly_causal(x: AttentionInputs) -> bool:
    """Whether the mask is causal, of as many queries as keys, and nothing more."""
    band = None if x.mask is None else x.mask.band()
    square = x.shape.Q == x.shape.K
    return square and band is not None and band[1] == 0 and band[0] <= 1 - x.shape.Q
