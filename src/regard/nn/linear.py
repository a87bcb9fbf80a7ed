"""Multi-head attention in linear time, on top of `regard.linear`."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard import linear
from regard.arguments import counted
from regard.errors import RegardError
from regard.linear.calls import checked
from regard.linear.features import elu_plus_one, refuse_no_map
from regard.linear.kernel import mixed
from regard.masks import Mask, padding
from regard.traces import Trace
from regard.values import whole

__all__ = ["LinearAttention", "elu_plus_one", "linear_attention"]


class LinearAttention(nn.Module):
    """Multi-head attention in O(n) time and memory, with a feature map in place of softmax.

    `feature` maps each head's queries and keys to numbers of 0 or more, which are then compared by
    a dot product: `elu_plus_one` or `torch.relu`, or any such function. It is another function than
    softmax attention, not an approximation of it, unless `feature` is
    `linear.random_features(width, count)`. A query whose features meet no key's gives 0.

    `mask` is `masks.causal()`, `window(left, right)`, `padding(lengths)`, `documents(ids)` or
    several joined by `&`; others are refused, since sums that queries share cannot leave out pairs.
    With `trace=True` a trace of the implied weights comes with the output; with `state`, a
    `linear.State`, a sequence may come in parts.

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
        counted("d_model", d_model)
        if whole("heads", heads) < 1 or d_model % heads:
            raise RegardError(
                "heads share d_model evenly",
                got=f"d_model={d_model}, heads={heads}",
                accepted="a number of heads that divides d_model",
            )
        if whole("chunk", chunk) < 1:
            raise RegardError("chunk counts keys", got=f"chunk={chunk}", accepted="1 or more")
        refuse_no_map(feature)
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
        trace: bool = False,
        state: linear.State | None = None,
    ) -> Float[Tensor, "b n d"] | tuple[Float[Tensor, "b n d"], Trace]:
        """x attends to itself, or to `memory`."""
        source = x if memory is None else memory
        wide = self.q_proj.in_features
        if any(t.ndim != 3 or t.shape[-1] != wide for t in (x, source)):
            raise RegardError(
                "the inputs are sequences of vectors, several at a time",
                got=" and ".join(str(list(t.shape)) for t in (x, memory) if t is not None),
                accepted=f"[batch, length, {wide}]",
                do="x[None] makes a batch of one",
            )
        q, k, v = self.q_proj(x), self.k_proj(source), self.v_proj(source)
        each = (self.heads, wide // self.heads)
        q, k, v = (t.unflatten(-1, each).transpose(1, 2) for t in (q, k, v))
        if not trace:
            out = linear.attention(
                q, k, v, features=self.feature, mask=mask, state=state, chunk=self.chunk
            )
            return self._joined(out)
        if state is not None:
            raise RegardError(
                "a trace knows the keys of its own call only",
                got="trace=True with state=",
                do="trace the whole sequence in one call",
            )
        seen = linear.trace(q, k, v, features=self.feature, mask=mask, chunk=self.chunk)
        return self._joined(seen.out), seen

    def _joined(self, out: Float[Tensor, "b h n e"]) -> Float[Tensor, "b n d"]:
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
    `regard.linear.attention` is the same with masks, and does more.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 100, 16)
    >>> linear_attention(q, k, v, chunk=32).shape
    torch.Size([1, 2, 100, 16])
    """
    refuse_no_map(feature)
    size = 64 if chunk is None else chunk
    x, order = checked(q, k, v, None if lengths is None else padding(lengths), size)
    order = order._replace(causal=chunk is not None)
    return x.in_kind(mixed(x.q, x.k, x.v, feature, order, size).out)
