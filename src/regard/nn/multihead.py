"""Several attentions side by side, each on its own projection of the input."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.arguments import counted, flag, refuse_dropout
from regard.biases.bias import Bias
from regard.calls import dispatch
from regard.errors import RegardError
from regard.masks import Mask
from regard.nn.cache import Cache
from regard.nn.rotary import Rotary
from regard.traces import Trace
from regard.values import whole


class MultiHeadAttention(nn.Module):
    """Each head compares its own projection of queries and keys and mixes its own values.

    - `d_model`: how wide the vectors are that come in and go out.
    - `heads`: how many compare side by side; each is d_model / heads wide unless said.
    - `kv_heads`: fewer than query heads is grouped-query attention (GQA), 1 is multi-query.
    - `head_width`: the head dimension; d_model / heads unless said.
    - `key_width`, `value_width`: how wide the inputs of keys and values are, when not d_model.
    - `bias`: none by default. What a bias adds to every key is the same for all of them, and
      softmax does not see it; those of values and output can live in the layer that follows.
    - `rotary`: a `Rotary`; positions rotate queries and keys (RoPE).
    - `qk_norm`: queries and keys are normalised per head (RMS), which bounds the logits.
    - `dropout`: the share of weights dropped in training.

    >>> import torch
    >>> from regard import masks, nn
    >>> attention = nn.MultiHeadAttention(64, 8, kv_heads=2, rotary=nn.Rotary())
    >>> attention(torch.randn(2, 10, 64), mask=masks.causal()).shape
    torch.Size([2, 10, 64])
    >>> y, seen = attention(torch.randn(2, 10, 64), mask=masks.causal(), trace=True)
    >>> seen.entropy.shape
    torch.Size([2, 8, 10])
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_width: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        bias: bool = False,
        rotary: Rotary | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        counted("d_model", d_model)
        self.d_model, self.heads = d_model, heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        _check_heads(d_model, heads, self.kv_heads, head_width)
        self.head_width = d_model // heads if head_width is None else head_width
        for name, width in (
            ("head_width", self.head_width),
            ("key_width", key_width),
            ("value_width", value_width),
        ):
            if width is not None:
                counted(name, width)
        refuse_dropout(dropout)
        bias, qk_norm = flag("bias", bias), flag("qk_norm", qk_norm)
        self.rotary, self.dropout = rotary, dropout
        if rotary is not None:
            if not isinstance(rotary, Rotary):
                raise RegardError(
                    "rotary= takes positions", got=repr(rotary), accepted="nn.Rotary() or None"
                )
            rotary.check(self.head_width)
        inner, shared = heads * self.head_width, self.kv_heads * self.head_width
        self.q_proj = nn.Linear(d_model, inner, bias=bias)
        self.k_proj = nn.Linear(d_model if key_width is None else key_width, shared, bias=bias)
        self.v_proj = nn.Linear(d_model if value_width is None else value_width, shared, bias=bias)
        self.out_proj = nn.Linear(inner, d_model, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_width, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_width, eps=1e-6) if qk_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections anew (Xavier), biases 0.

        >>> attention = MultiHeadAttention(8, 2, bias=True)
        >>> attention.reset_parameters()
        >>> bool(attention.q_proj.bias.any())
        False
        """
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        memory: Float[Tensor, "b m e"] | None = None,
        values: Float[Tensor, "b m f"] | None = None,
        *,
        mask: Mask | None = None,
        bias: Bias | None = None,
        cache: Cache | None = None,
        trace: bool = False,
    ) -> Float[Tensor, "b n d"] | tuple[Float[Tensor, "b n d"], Trace]:
        """Self-attention; or cross-attention to `memory`.

        - `x`: what queries are made of; without `memory`, keys and values too.
        - `memory`: what keys and values are made of instead of x.
        - `values`: what values are made of, if not of `memory`.
        - `mask`: which pairs may be seen, from `regard.masks`; `masks.keep(t)` for booleans.
        - `bias`: what is added to the logits, from `regard.biases`.
        - `cache`: keys and values of the sequence that x continues.
        - `trace`: return (output, Trace); the output is the same.
        """
        self._check(x, memory, values, cache)
        source = x if memory is None else memory
        q = self._split(self.q_proj(x))
        k = self._split(self.k_proj(source))
        v = self._split(self.v_proj(source if values is None else values))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _normed(self.q_norm, q), _normed(self.k_norm, k)
        if self.rotary is not None:
            first = 0 if cache is None else cache.position
            q, k = self.rotary(q, first), self.rotary(k, first)
        if cache is not None:
            mask = cache.limit(mask, bias)
            k, v = cache.joined(k, v)
        how: dict[str, Any] = {
            "mask": mask, "bias": bias, "dropout": self.dropout, "training": self.training
        }  # fmt: skip
        seen = dispatch.trace(q, k, v, **how) if trace else None
        out = dispatch.attention(q, k, v, **how) if seen is None else seen.out
        if cache is not None:
            # A call that was refused leaves it as it was.
            cache.hold(k, v)
        return self._join(out) if seen is None else (self._join(out), seen)

    def _split(self, x: Float[Tensor, "b n inner"]) -> Float[Tensor, "b h n w"]:
        # Not by -1, which sequences of no tokens leave open.
        sizes = x.shape[-1] // self.head_width, self.head_width
        split: Tensor = x.unflatten(-1, sizes)
        return split.transpose(1, 2)

    def _join(self, x: Float[Tensor, "b h n w"]) -> Float[Tensor, "b n d"]:
        joined: Tensor = self.out_proj(x.transpose(1, 2).flatten(2))
        return joined

    def _check(
        self, x: Tensor, memory: Tensor | None, values: Tensor | None, cache: Cache | None
    ) -> None:
        source = x if memory is None else memory
        if x.ndim != 3 or source.ndim != 3 or (values is not None and values.ndim != 3):
            raise RegardError(
                "the inputs are sequences of vectors, several at a time",
                got=" and ".join(str(list(t.shape)) for t in (x, memory, values) if t is not None),
                accepted="[batch, length, width]",
                do="x[None] makes a batch of one",
            )
        wide = self.d_model, self.k_proj.in_features, self.v_proj.in_features
        came = x.shape[-1], source.shape[-1], (source if values is None else values).shape[-1]
        if came != wide:
            raise RegardError(
                "the inputs are not as wide as this module was made for",
                got="queries {}, keys {}, values {} wide".format(*came),
                accepted="queries {}, keys {}, values {} wide".format(*wide),
                do="set d_model, key_width= and value_width=",
            )
        if memory is None:
            return
        if self.rotary is not None:
            raise RegardError(
                "rotary positions compare places of one sequence",
                got="memory=, a second sequence",
                accepted="self-attention",
                do="use a module without rotary= to attend to memory",
            )
        if cache is not None:
            raise RegardError(
                "a cache remembers the past of x",
                got="cache= together with memory=",
                accepted="cache= in self-attention",
                do="leave cache= out: memory is whole at every step",
            )

    def extra_repr(self) -> str:
        """The heads, for print(module).

        >>> MultiHeadAttention(64, 8, kv_heads=2).extra_repr()
        'heads=8, kv_heads=2, head_width=8'
        """
        shared = "" if self.kv_heads == self.heads else f", kv_heads={self.kv_heads}"
        rotary = "" if self.rotary is None else f", {self.rotary}"
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        return f"heads={self.heads}{shared}, head_width={self.head_width}{rotary}{dropout}"


def _normed(norm: nn.RMSNorm, x: Float[Tensor, "b h n w"]) -> Float[Tensor, "b h n w"]:
    # Under autocast x is of lower precision than the norm, which then warns and runs unfused.
    normed: Tensor = norm(x.to(norm.weight.dtype))
    return normed.to(x.dtype)


def _check_heads(d_model: int, heads: int, kv_heads: int, head_width: int | None) -> None:
    if whole("heads", heads) < 1 or (head_width is None and d_model % heads):
        raise RegardError(
            "heads share d_model evenly",
            got=f"d_model={d_model}, heads={heads}",
            accepted="a number of heads that divides d_model",
            do="or set head_width= for heads of another width",
        )
    if whole("kv_heads", kv_heads) < 1 or heads % kv_heads:
        raise RegardError(
            "query heads share key heads evenly",
            got=f"heads={heads}, kv_heads={kv_heads}",
            accepted="kv_heads that divides heads",
        )
