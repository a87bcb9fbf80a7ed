"""Gated linear attention and the delta rule on a CUDA GPU, beside PyTorch's operations, the kernels
of flash-linear-attention where they are installed, and fused softmax attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

import regard
from regard import linear, masks

CAUSAL = masks.causal()
Form = Callable[..., Tensor]
RULES = ("gated", "delta", "gated delta")


class Call(NamedTuple):
    """The tensors of one call, in the order in which forms take them."""

    q: Tensor
    k: Tensor
    v: Tensor
    numbers: tuple[Tensor, ...]
    """log_decay, beta, or both."""

    @property
    def tensors(self) -> list[Tensor]:
        return [*self[:3], *self.numbers]


def drawn(rule: str, heads: int, n: int, width: int, dtype: torch.dtype, seed: int = 0) -> Call:
    """Keys of length 1, decays near 1, rates between 0 and 1, all of them learned. In memory they
    lie token by token, as the projections of a model leave them: fla takes no others."""
    source = torch.Generator("cuda").manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(1, n, heads, *shape, generator=source, device="cuda").transpose(1, 2)

    q, k, v = numbers(width), normalize(numbers(width), dim=-1), numbers(width)
    more = []
    if "gated" in rule:
        more.append(logsigmoid(numbers() + 3))
    if "delta" in rule:
        more.append(numbers().sigmoid())
    # Gates are kept in float32, as models that have them do.
    learned = [t.to(dtype).detach().requires_grad_() for t in (q, k, v)]
    return Call(*learned, tuple(t.detach().requires_grad_() for t in more))


def _numbers(rule: str, more: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    decay = more[0] if "gated" in rule else None
    return decay, more[-1] if "delta" in rule else None


def ours(rule: str, backend: str) -> Form:
    def run(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        decay, beta = _numbers(rule, more)
        if beta is None:
            assert decay is not None
            return linear.gated(q, k, v, decay, backend=backend)
        return linear.delta(q, k, v, beta, decay, backend=backend)

    return run


def by_tokens(rule: str) -> Form:
    """As it is written down, one token after the other, in the precision of the tensors."""

    def run(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        decay, beta = _numbers(rule, more)
        decay, beta = (None if t is None else t.to(q.dtype) for t in (decay, beta))
        state, outs = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
        for i in range(q.shape[2]):
            if decay is not None:
                state = state * decay[:, :, i, None, None].exp()
            key, new = k[:, :, i, :, None], v[:, :, i, None]
            if beta is not None:
                new = beta[:, :, i, None, None] * (new - key.mT @ state)
            state = state + key * new
            outs.append(q[:, :, i, None] * q.shape[3] ** -0.5 @ state)
        return torch.cat(outs, 2)

    return run


def peers(rule: str) -> dict[str, Form]:
    """The same of flash-linear-attention: its scale is 1/√D too, its gates are logarithms, and keys
    come with length 1. Its axes are [B, N, H, D]."""
    if find_spec("fla") is None:
        return {}
    from fla.ops.delta_rule import chunk_delta_rule  # type: ignore[import-not-found]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]
    from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found]

    kernels: dict[str, Any] = {
        "gated": chunk_simple_gla, "delta": chunk_delta_rule, "gated delta": chunk_gated_delta_rule,
    }  # fmt: skip

    def run(*given: Tensor) -> Tensor:
        found: Tensor = kernels[rule](*(t.transpose(1, 2) for t in given))[0]
        return found.transpose(1, 2)

    return {"fla": run}


def softmax() -> dict[str, Form]:
    """Fused attention of the same q, k and v."""
    return {
        "regard.attention": lambda q, k, v, *_: regard.attention(q, k, v, mask=CAUSAL),
        "SDPA": lambda q, k, v, *_: scaled_dot_product_attention(q, k, v, is_causal=True),
    }


def forms(rule: str) -> dict[str, Form]:
    return {"ours": ours(rule, "triton"), "plain": ours(rule, "tiled"), **peers(rule), **softmax()}


def checked(*, quick: bool) -> Iterator[tuple[str, torch.dtype, int, list[str], Form, Form, Any]]:
    """Calls whose answers are compared with those of float64."""
    types = (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16, torch.float32)
    for dtype in types:
        for width in (64,) if quick else (64, 128):
            for rule in RULES:
                call = drawn(rule, 2, 300, width, dtype)
                names = ["out", "dq", "dk", "dv"]
                names += ["d log_decay"] if "gated" in rule else []
                names += ["d beta"] if "delta" in rule else []
                yield rule, dtype, width, names, ours(rule, "triton"), by_tokens(rule), call.tensors
