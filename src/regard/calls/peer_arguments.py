"""Arguments of other attention functions, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from regard.errors import RegardError

if TYPE_CHECKING:
    from typing import Never

    Unknown = Never
    """A type checker refuses any argument that has no name in a signature."""
else:
    Unknown = Any

_CAUSAL = "mask=masks.causal()"
_WEIGHTS = "regard.trace(q, k, v, ...).weights(), of the rows, keys and heads that you want"
_SCALE = "scale="
INSTEAD: Mapping[str, str] = {
    "alibi_slopes": "bias=biases.alibi(slopes)",
    "attention_mask": "mask=masks.from_huggingface(attention_mask)",
    "attn_bias": "bias=biases.dense(t)",
    "attn_mask": "mask=masks.from_sdpa(t) if True may be seen, masks.from_multihead(t) if True is "
    "masked, bias=biases.dense(t) for numbers to add",
    "average_attn_weights": "regard.trace(q, k, v, ...).weights().mean(1)",
    "block_mask": "mask=masks.where(f) of its function",
    "causal": _CAUSAL,
    "cu_seqlens_k": "cu_seqlens=(of queries, of keys)",
    "cu_seqlens_q": "cu_seqlens=(of queries, of keys)",
    "dropout_p": "dropout=p, training=True",
    "enable_gqa": "nothing: fewer key heads than query heads are grouped",
    "head_mask": "interpret.ablate, or the output times a number per head",
    "is_causal": _CAUSAL,
    "key_padding_mask": "mask=masks.from_multihead(key_padding_mask=t)",
    "logits_soft_cap": "softcap=",
    "mask_mod": "mask=masks.where(f)",
    "need_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "return_attn_probs": _WEIGHTS,
    "return_lse": "regard.trace(q, k, v, ...).lse",
    "s_aux": "sink=",
    "scaling": _SCALE,
    "score_mod": "bias=biases.pairwise(f), or softcap=",
    "sinks": "sink=",
    "sliding_window": "mask=masks.from_huggingface(is_causal=True, sliding_window=n)",
    "sm_scale": _SCALE,
    "softmax_scale": _SCALE,
    "window_size": "mask=masks.from_flash(causal, window_size)",
}
"""What other libraries call a thing, and how it is said here."""


def refuse_arguments(function: str, unknown: Mapping[str, object], accepted: str) -> NoReturn:
    """Say what to write for an argument that has another name here, or none."""
    name = next((name for name in unknown if name in INSTEAD), next(iter(unknown)))
    raise RegardError(
        f"{function} has no argument {name}=",
        got=", ".join(f"{name}={_short(value)}" for name, value in unknown.items()),
        accepted=accepted,
        do=INSTEAD.get(name, ""),
    )


def _short(value: object) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str, tuple)) else "…"
