"""Attention in linear time: a kernel of features in place of the exponential.

    out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)

The sum over keys does not depend on the query: Σ_j φ(k_j) v_jᵀ is one small matrix. When each query
sees only what came before, that matrix grows along the sequence; keys are taken in chunks, exact
pairs within a chunk, and the matrix of all earlier chunks for the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import RegardError
from regard.masks import Mask
from regard.masks.algebra import And
from regard.masks.causal import Causal
from regard.masks.padding import Padding


def elu_plus_one(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """elu(x) + 1: above 0 everywhere, x + 1 for x > 0.

    >>> import torch
    >>> elu_plus_one(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0.3679, 1.0000, 3.0000])
    """
    # Written out: the compiler is told wrong strides for the gradient of PyTorch's elu (2.13).
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


class LinearAttention(nn.Module):
    """Multi-head attention in O(n) time and memory, with a feature map in place of softmax.

    `feature` maps each head's queries and keys to numbers of 0 or more, which are then compared by
    a dot product: `elu_plus_one` or `torch.relu`, or any such function. It is another function than
    softmax attention, not an approximation of it. A query whose features meet no key's gives 0.
    There are no weights per pair to look into, so there is no trace.

    `mask` is `masks.causal()`, `masks.padding(lengths)` or both joined by `&`; others are refused,
    since a sum that all queries share cannot leave out pairs.

    >>> import torch
    >>> from regard import masks, nn
    >>> attention = nn.LinearAttention(64, 8)
    >>> attention(torch.randn(2, 1000, 64), mask=masks.causal() & masks.padding([1000, 700])).shape
    torch.Size([2, 1000, 64])
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        feature: Callable[[Tensor], Tensor] = elu_plus_one,
        chunk: int = 64,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if heads < 1 or d_model % heads:
            raise RegardError(
                "heads share d_model evenly",
                got=f"d_model={d_model}, heads={heads}",
                accepted="a number of heads that divides d_model",
            )
        if chunk < 1:
            raise RegardError("chunk counts keys", got=f"chunk={chunk}", accepted="1 or more")
        self.heads, self.feature, self.chunk = heads, feature, chunk
        self.q_proj = nn.Linear(d_model, d_model, bias=bias)
        self.k_proj = nn.Linear(d_model, d_model, bias=bias)
        self.v_proj = nn.Linear(d_model, d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        memory: Float[Tensor, "b m d"] | None = None,
        *,
        mask: Mask | None = None,
    ) -> Float[Tensor, "b n d"]:
        """x attends to itself, or to `memory`."""
        source = x if memory is None else memory
        is_causal, lengths = _read(mask, x.shape[1], source.shape[1])
        q, k, v = self.q_proj(x), self.k_proj(source), self.v_proj(source)
        q, k, v = (t.reshape(*t.shape[:2], self.heads, -1).transpose(1, 2) for t in (q, k, v))
        chunk = self.chunk if is_causal else None
        out = linear_attention(q, k, v, self.feature, lengths=lengths, chunk=chunk)
        joined: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return joined

    def extra_repr(self) -> str:
        """The heads and features, for print(module).

        >>> LinearAttention(64, 8).extra_repr()
        'heads=8, feature=elu_plus_one, chunk=64'
        """
        name = getattr(self.feature, "__name__", repr(self.feature))
        return f"heads={self.heads}, feature={name}, chunk={self.chunk}"


def linear_attention(
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b h k d"],
    v: Float[Tensor, "b h k e"],
    feature: Callable[[Tensor], Tensor] = elu_plus_one,
    *,
    lengths: Int[Tensor, "b"] | None = None,
    chunk: int | None = None,
) -> Float[Tensor, "b h q e"]:
    """Linear attention of heads already split; with `chunk`, causal, in chunks of that size.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 100, 16)
    >>> linear_attention(q, k, v, chunk=32).shape
    torch.Size([1, 2, 100, 16])
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    a, b, c = feature(q.to(dtype)), feature(k.to(dtype)), v.to(dtype)
    # The sum of weights is the mix of values that are all 1: one more column carries it along.
    c = torch.cat([c, torch.ones_like(c[..., :1])], -1)
    if lengths is not None:
        seen = torch.arange(k.shape[2], device=k.device) < lengths.to(k.device)[:, None]
        seen = seen[:, None, :, None]
        b, c = torch.where(seen, b, 0.0), torch.where(seen, c, 0.0)
    mixed = a @ (b.mT @ c) if chunk is None else _causal(a, b, c, chunk)
    out, total = mixed[..., :-1], mixed[..., -1:]
    empty = total == 0
    return torch.where(empty, 0.0, out / torch.where(empty, 1.0, total)).to(v.dtype)


def _causal(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    chunk: int,
) -> Float[Tensor, "b h n e"]:
    """Σ_{j ≤ i} (q_i·k_j) v_j."""
    n = q.shape[2]
    count = -(-n // chunk)
    pad = nn.functional.pad
    q, k, v = (pad(t, (0, 0, 0, count * chunk - n)) for t in (q, k, v))
    q, k, v = (t.reshape(*t.shape[:2], count, chunk, t.shape[3]) for t in (q, k, v))
    through = (k.mT @ v).cumsum(2)
    before = pad(through, (0, 0, 0, 0, 1, 0))[:, :, :-1]
    out = (q @ k.mT).tril() @ v + q @ before
    return out.flatten(2, 3)[:, :, :n]


def _read(mask: Mask | None, queries: int, keys: int) -> tuple[bool, Tensor | None]:
    """Whether a mask is causal, and the lengths it names."""
    match mask:
        case None:
            return False, None
        case Causal(offset):
            if queries != keys or (offset is not None and offset != 0):
                raise RegardError(
                    "linear attention is causal over one sequence only",
                    got=f"{mask!r} with {queries} queries and {keys} keys",
                    accepted="causal() in self-attention",
                )
            return True, None
        case Padding(lengths):
            return False, lengths  # type: ignore[return-value]
        case And(left, right):
            parts = _read(left, queries, keys), _read(right, queries, keys)
            named = [part[1] for part in parts if part[1] is not None]
            if len(named) < 2:
                return parts[0][0] or parts[1][0], named[0] if named else None
    raise RegardError(
        "linear attention cannot leave out these pairs",
        got=repr(mask),
        accepted="causal(), padding(lengths), or both joined by &",
        do="use MultiHeadAttention for other masks",
    )
