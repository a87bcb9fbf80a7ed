"""A press for kvpress that scores keys by the attention they received, without eager attention."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regard.caches.policies import by_key_head
from regard.calls import dispatch
from regard.errors import RegardError
from regard.traces import Trace
from regard.watching.huggingface import by_name
from regard.watching.huggingface.attention import check_window, mask_and_bias
from regard.watching.huggingface.later_weights import LaterWeights
from regard.watching.huggingface.switch import own_functions

Press: Any = object
missing = ""
"""Why kvpress cannot be imported; said when a press is made."""
try:
    from kvpress.attention_patch import attention_patch
    from kvpress.presses.scorer_press import ScorerPress as Press  # type: ignore[no-redef]
    from kvpress.utils import get_prerope_query_states
except ImportError as error:
    missing = str(error)
else:
    # kvpress wraps the attention functions that are there when it is imported, to mask what AdaKV
    # takes from single heads. Ours may have come later, and would see it.
    if ALL_ATTENTION_FUNCTIONS[by_name.NAME] is by_name.attend_by_name:
        wrapped = attention_patch(by_name.attend_by_name)
        ALL_ATTENTION_FUNCTIONS[by_name.NAME] = wrapped
        own_functions.append(wrapped)


@dataclass
class ReceivedPress(Press):  # type: ignore[misc]
    """Keep the keys that received most attention: the scores of kvpress's
    `ObservedAttentionPress`, with any attention implementation but eager, so that `AdaKVPress` can
    be put around it.

    A score is the mean over the queries that may see a key (`average=False`: their sum, as H2O has
    it) and over the query heads that share it. With `attn_implementation="regard"` and
    `output_attentions=True` the scores come from the model's own pass; else queries are projected
    once more, as `SnapKVPress` does, and the scores come from a pass of ours.
    """

    compression_ratio: float = 0.0
    average: bool = True

    def __post_init__(self) -> None:
        if missing:
            raise RegardError(
                "ReceivedPress is a press of kvpress, which cannot be imported",
                got=missing,
                do="pip install 'regard[kvpress]'; without it, regard.caches.EvictingCache chooses "
                "by such scores",
            )
        super().__post_init__()

    @torch.no_grad()
    def score(
        self,
        module: nn.Module,
        hidden_states: Float[Tensor, "b n width"],
        keys: Float[Tensor, "b g n d"],
        values: Float[Tensor, "b g n e"],
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Float[Tensor, "b g n"]:
        """The score of each key, as kvpress asks for it."""
        trace = attentions.source if isinstance(attentions, LaterWeights) else None
        if trace is None:
            trace = _traced(module, hidden_states, keys, values, kwargs)
        received = trace.received()
        if self.average:
            n = keys.shape[2]
            received = received / torch.arange(n, 0, -1, device=received.device)
        return by_key_head(trace, received) / trace.inputs.group


def _traced(
    module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, kwargs: dict[str, Any]
) -> Trace:
    """The attention of a module over its prompt, from what went into it."""
    query = get_prerope_query_states(module, hidden_states)
    if kwargs.get("position_embeddings") is not None:
        query = _rotated(module, query, *kwargs["position_embeddings"])
    Q, K, given = query.shape[2], keys.shape[2], kwargs.get("attention_mask")
    check_window(module, given, getattr(module, "sliding_window", None), Q, K)
    mask, bias = mask_and_bias(module, given, None, True, Q, K)
    return dispatch.trace(
        query, keys, values, mask=mask, bias=bias, scale=getattr(module, "scaling", None),
        softcap=getattr(module, "attn_logit_softcapping", None),
        sink=getattr(module, "sinks", None),
    )  # fmt: skip


def _rotated(module: Any, query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries at their positions, by the model's own function: some rotate halves of a head, some
    neighbours, some only its first part."""
    turn = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    names = [] if turn is None else [*inspect.signature(turn).parameters]
    width = getattr(module, "rotary_ndims", query.shape[-1])
    first, rest = query[..., :width], query[..., width:]
    if names[:4] == ["q", "k", "cos", "sin"]:
        first = turn(first, first, cos, sin)[0]  # type: ignore[misc]
    elif names[1:3] == ["cos", "sin"]:
        first = turn(first, cos, sin)  # type: ignore[misc]
    else:
        raise RegardError(
            f"how {type(module).__name__} rotates its queries is not known",
            got="no apply_rotary_pos_emb" if turn is None else f"{turn.__name__}{tuple(names)}",
            accepted="apply_rotary_pos_emb(q, k, cos, sin) beside the module's class",
            do='load the model with attn_implementation="regard" and call it with '
            "output_attentions=True: then the scores come from its own pass",
        )
    return torch.cat([first, rest], -1)
