"""What a call asks for beside its tensors, said in everybody's words: regard's, those of PyTorch's
scaled_dot_product_attention, and as rules of single pairs, which FlexAttention and the check take.

The rules are written here, not taken from regard's masks, so that the check knows if those err.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard import biases, masks

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a pair is allowed, of batch entry, head, query and key."""
Change = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A logit changed, of the logit and the same four."""

WINDOW, DOCUMENT, PREFIX, CAP, DROPPED = 1024, 1300, 2000, 30.0, 0.1


@dataclass(frozen=True)
class Kind:
    regard: dict[str, Any] = field(default_factory=dict)
    sdpa: dict[str, Any] | None = None
    """None where scaled_dot_product_attention cannot say it without an n×n tensor."""
    rule: Rule | None = None
    """None where every pair is allowed."""
    change: Change | None = None
    sink: Tensor | None = None
    dropout: float = 0.0
    batch: int = 1
    """Batch entries that the rule tells apart."""
    sharpness: float = 1.0
    """How large logits are as a rule."""

    @property
    def mask(self) -> masks.Mask | None:
        mask: masks.Mask | None = self.regard.get("mask")
        return mask


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def kind_of(
    name: str, batch: int, heads: int, n: int, device: str, dtype: torch.dtype, *, grad: bool
) -> Kind:
    """A kind by its name, for calls of so many tokens. Lengths shrink with calls that are too short
    for them, which only trials are."""
    causal: dict[str, Any] = {"mask": masks.causal()}
    match name:
        case "causal":
            return Kind(causal, {"is_causal": True}, _causal)
        case "full":
            return Kind({}, {})
        case "window":
            left = min(WINDOW, n // 4)
            mask = masks.causal() & masks.window(left)
            return Kind({"mask": mask}, rule=lambda b, h, q, k: (k <= q) & (q - k <= left))
        case "documents":
            ids = document_ids(n).to(device)
            mask = masks.causal() & masks.documents(ids)
            return Kind({"mask": mask}, rule=lambda b, h, q, k: (k <= q) & (ids[q] == ids[k]))
        case "prefix":
            first = min(PREFIX, n // 4)
            mask = masks.causal() | masks.prefix(first)
            return Kind({"mask": mask}, rule=lambda b, h, q, k: (k <= q) | (k < first))
        case "padding":
            lengths = torch.full((batch,), n, device=device)
            lengths[batch // 2 :] = n // 2
            seen = torch.arange(n, device=device) < lengths[:, None]
            return Kind(
                {"mask": masks.padding(lengths)},
                {"attn_mask": seen[:, None, None]},
                lambda b, h, q, k: k < lengths[b],
                batch=batch,
            )
        case "ALiBi":
            slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device=device) / heads)
            return Kind(
                causal | {"bias": biases.alibi(slopes)},
                rule=_causal,
                change=lambda s, b, h, q, k: s - slopes[h] * (q - k),
            )
        case "soft-cap":
            return Kind(
                causal | {"softcap": CAP},
                rule=_causal,
                change=lambda s, b, h, q, k: CAP * torch.tanh(s / CAP),
                # The cap is to be felt: a kernel may be quicker, and a check blind, far below it.
                sharpness=CAP / 4,
            )
        case "sink":
            sink = torch.linspace(-1, 3, heads, device=device, dtype=dtype).requires_grad_(grad)
            return Kind(causal | {"sink": sink}, rule=_causal, sink=sink)
        case "dropout":
            return Kind(
                causal | {"dropout": DROPPED, "training": True},
                {"is_causal": True, "dropout_p": DROPPED},
                _causal,
                dropout=DROPPED,
            )
    raise ValueError(f"no kind of call {name!r}")


def document_ids(n: int) -> Tensor:
    """Documents of varying lengths, end to end until n tokens are full."""
    mean = min(DOCUMENT, n // 4)
    source = torch.Generator().manual_seed(0)
    # As many as would do if all were of the shortest length.
    shortest, longest = max(mean // 4, 1), 2 * mean - mean // 4
    lengths = torch.randint(shortest, longest + 1, (n // shortest + 1,), generator=source)
    return torch.arange(len(lengths)).repeat_interleave(lengths)[:n]
