"""regard's attention in the place of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from regard import biases, masks
from regard.arguments import flag, refuse_dropout, refuse_no_module
from regard.biases.bias import Bias
from regard.calls import dispatch
from regard.errors import RegardError
from regard.masks import Mask
from regard.values import whole


class DropInError(RegardError, RuntimeError, AssertionError):
    """A call that a `DropIn` refuses. PyTorch's own module raises RuntimeError for some of these
    and AssertionError for others: whoever catches either catches this.

    >>> issubclass(DropInError, ValueError), issubclass(DropInError, RuntimeError)
    (True, True)
    """


class DropIn(nn.MultiheadAttention):
    """`nn.MultiheadAttention` whose attention is regard's: made, called, saved and loaded alike.

    It is one, with the constructor, the attributes, the parameters and the state dict of PyTorch's;
    only `forward` differs. It is always called, also inside `nn.TransformerEncoder` in eval
    mode. Three things differ, all of them on purpose: weights are those before dropout; a query
    that may see nothing gives 0 and not NaN; and `is_causal=True` is the causal mask itself,
    `attn_mask` need not repeat it and is not looked at.

    >>> import torch
    >>> from regard import nn
    >>> ours = nn.DropIn(16, 2, batch_first=True)
    >>> theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    >>> theirs.load_state_dict(ours.state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(2, 5, 16)
    >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # Numbers that do not fit each other are PyTorch's to refuse, in its own words.
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim}
        for name, size in sizes.items():
            if size is not None:
                whole(name, size)
        refuse_dropout(dropout)
        flags = {"bias": bias, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn,
                 "batch_first": batch_first}  # fmt: skip
        for name, value in flags.items():
            flag(name, value)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim,
            batch_first, device, dtype,
        )  # fmt: skip
        self.register_forward_pre_hook(_always_called)

    @classmethod
    def of(cls, theirs: nn.MultiheadAttention) -> DropIn:
        """A drop-in with the very parameters of PyTorch's module, not copies, and with its hooks:
        optimisers, ties and handles of hooks stay good.

        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
        >>> layer.self_attn = DropIn.of(layer.self_attn)
        >>> with torch.no_grad():
        ...     layer(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
        """
        if type(theirs) is not nn.MultiheadAttention:
            raise RegardError(
                "a drop-in takes the place of PyTorch's own module",
                got=f"{type(theirs).__module__}.{type(theirs).__qualname__}",
                accepted="torch.nn.MultiheadAttention itself: what is derived from it, or has "
                "parametrized weights, may compute something else",
                do="remove parametrizations first; replace modules of your own by hand",
            )
        own_call = {"forward", "_compiled_call_impl"} & vars(theirs).keys()
        if own_call:
            raise RegardError(
                "this module is called in a way of its own, which a drop-in would take over",
                got=f"its {', '.join(sorted(own_call))} was replaced, as by module.compile() or a "
                "package that wraps modules",
                do="put the drop-in in place first, and wrap or compile it then",
            )
        made = cls.__new__(cls)
        own = ("_parameters", "_buffers", "_modules")
        made.__dict__ |= {
            name: dict(part) if name in own else part for name, part in vars(theirs).items()
        }
        made.register_forward_pre_hook(_always_called)
        return made

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`: True in a mask is masked, floats are added to logits.

        [length, batch, width], or [batch, length, width] with `batch_first`, or [length, width];
        or one nested tensor as all three."""
        if query.is_nested or key.is_nested or value.is_nested:
            _check_nested(query, key, value, key_padding_mask, attn_mask)
            return self._packed(query, need_weights, average_attn_weights)
        self._check(query, key, value, key_padding_mask, attn_mask)
        return self._attended(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights,
            is_causal,
        )  # fmt: skip

    def _attended(
        self,
        query: Float[Tensor, "*nb d"],
        key: Float[Tensor, "*mb e"],
        value: Float[Tensor, "*mb f"],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Float[Tensor, "*nb d"], Float[Tensor, "*bh n m"] | None]:
        batched = query.ndim == 3
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        q, k, v = self._projected(query, key, value)
        k, v, extra = self._with_more_keys(k, v)
        attn_mask = None if is_causal else attn_mask
        mask, bias = self._masks(attn_mask, key_padding_mask, extra, query.dtype)
        if is_causal:
            causal: Mask = masks.causal(offset=0)
            if extra:
                places = torch.arange(k.shape[2], device=k.device)
                causal = causal | masks.keep((places >= k.shape[2] - extra)[None, None, None])
            mask = causal if mask is None else mask & causal
        how: dict[str, Any] = {
            "mask": mask, "bias": bias, "dropout": self.dropout, "training": self.training
        }  # fmt: skip
        weights: Tensor | None = None
        if need_weights:
            seen = dispatch.trace(q, k, v, **how)
            mixed, weights = seen.out, seen.weights().to(query.dtype)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = dispatch.attention(q, k, v, **how)
        out = F.linear(mixed.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values, each [B, H, N, D]."""
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        bias = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if query is key and key is value and self._qkv_same_embed_dim:
            # One product is quicker than three, and keeps its input once for the gradient.
            whole = F.linear(self._batch_first(query), self.in_proj_weight, self.in_proj_bias)
            each = list(whole.chunk(3, -1))
        else:
            each = [
                F.linear(self._batch_first(x), w, b)
                for x, w, b in zip((query, key, value), weights, bias, strict=True)
            ]
        return [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in each]

    def _with_more_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keys and values with those that PyTorch appends, and how many these are."""
        more: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            per_head = (self.bias_k, self.bias_v)
            learned = [b.view(1, self.num_heads, 1, -1).to(k.dtype) for b in per_head]
            more.append((learned[0], learned[1]))
        if self.add_zero_attn:
            more.append((k.new_zeros(1, 1, 1, 1), v.new_zeros(1, 1, 1, 1)))
        if not more:
            return k, v, 0
        size = (*k.shape[:2], 1, k.shape[-1])
        return (
            torch.cat([k, *(new.expand(size) for new, _ in more)], 2),
            torch.cat([v, *(new.expand(size) for _, new in more)], 2),
            len(more),
        )

    def _masks(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        extra: int,
        dtype: torch.dtype,
    ) -> tuple[Mask | None, Bias | None]:
        """Booleans as a mask, floats as a bias: PyTorch's layers turn the first into the second.
        Appended keys may be seen by all."""
        hidden: dict[str, Tensor] = {}
        added: Tensor | None = None
        if attn_mask is not None:
            attn_mask = F.pad(attn_mask, (0, extra)) if extra else attn_mask
            if attn_mask.is_floating_point():
                per_head = attn_mask[None] if attn_mask.ndim == 2 else attn_mask
                heads = self.num_heads if attn_mask.ndim == 3 else 1
                split = (len(per_head) // heads, heads)
                added = per_head.unflatten(0, split).to(dtype)
            else:
                hidden["attn_mask"] = attn_mask
        if key_padding_mask is not None:
            key_padding_mask = F.pad(key_padding_mask, (0, extra)) if extra else key_padding_mask
            if key_padding_mask.is_floating_point():
                padding = key_padding_mask[:, None, None, :].to(dtype)
                added = padding if added is None else added + padding
            else:
                hidden["key_padding_mask"] = key_padding_mask
        mask = masks.from_multihead(**hidden, heads=self.num_heads)
        return mask, None if added is None else biases.dense(added)

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _packed(
        self, x: Tensor, need_weights: bool, average_attn_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention of a nested tensor, which `nn.TransformerEncoder` makes of padded batches
        in eval mode. Weights are padded with zeros to the longest, as PyTorch gives them."""
        lengths = [len(part) for part in x.unbind()]
        whole = torch.nested.to_padded_tensor(x, 0.0)
        places = torch.arange(whole.shape[1], device=x.device)
        hidden = places >= torch.tensor(lengths, device=x.device)[:, None]
        # A batch of nested tensors comes first, whatever batch_first= says.
        whole = whole if self.batch_first else whole.transpose(0, 1)
        out, weights = self._attended(
            whole, whole, whole, hidden, need_weights, None, average_attn_weights
        )
        if weights is not None:
            rows = hidden[:, :, None] if average_attn_weights else hidden[:, None, :, None]
            weights = weights.masked_fill(rows, 0.0)
        out = out if self.batch_first else out.transpose(0, 1)
        parts = [part[:n] for part, n in zip(out, lengths, strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=x.layout), weights

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> None:
        n = query.ndim
        order = "batch, length, width" if self.batch_first else "length, batch, width"
        if n not in (2, 3) or key.ndim != n or value.ndim != n:
            raise DropInError(
                "query, key and value are sequences of vectors, all with a batch or all without",
                got=_shapes(query, key, value),
                accepted=f"[{order}], or [length, width]",
            )
        wide = self.embed_dim, self.kdim, self.vdim
        if (query.shape[-1], key.shape[-1], value.shape[-1]) != wide:
            raise DropInError(
                "the inputs are not as wide as this module was made for",
                got=_shapes(query, key, value),
                accepted="queries {}, keys {}, values {} wide".format(*wide),
                do="set embed_dim, kdim= and vdim=",
            )
        where = 0 if self.batch_first else 1
        B = query.shape[where] if n == 3 else 1
        if key.shape[:-1] != value.shape[:-1] or (n == 3 and key.shape[where] != B):
            raise DropInError(
                "each key has a value, and each query of a batch its keys",
                got=_shapes(query, key, value),
                accepted=f"[{order}] with one batch, and as many keys as values",
                do="see batch_first=, which says which axis is the batch",
            )
        Q, K = query.shape[1 - where if n == 3 else 0], key.shape[1 - where if n == 3 else 0]
        padding = [B, K] if n == 3 else [K]
        _check_mask("key_padding_mask", key_padding_mask, [padding])
        _check_mask("attn_mask", attn_mask, [[Q, K], [B * self.num_heads, Q, K]])


def _check_nested(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> None:
    masked = key_padding_mask is not None or attn_mask is not None
    if query is not key or key is not value or masked:
        raise DropInError(
            "nested tensors attend to themselves, without masks",
            got=f"query is key: {query is key}, key is value: {key is value}, masks: {masked}",
            do="pad them: torch.nested.to_padded_tensor, and key_padding_mask=",
        )


def _check_mask(name: str, mask: Tensor | None, sizes: list[list[int]]) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DropInError(
            f"{name} says what is masked, or what is added to scores",
            got=str(mask.dtype),
            accepted="torch.bool, where True is masked; or floats, which are added",
        )
    if list(mask.shape) not in sizes:
        raise DropInError(
            f"{name} does not fit query and key",
            got=str(list(mask.shape)),
            accepted=" or ".join(map(str, sizes)),
        )


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"


def _always_called(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A hook that does nothing. In eval mode PyTorch's encoder layer hands the weights of its
    attention to a C++ kernel and never calls the module, unless something inside has a hook."""


def replace_attention(model: nn.Module) -> list[str]:
    """Put a `DropIn` in the place of every `nn.MultiheadAttention` of a model; returns their names.

    Parameters and hooks are those of the modules that were there: an optimiser made before stays
    good, and so do checkpoints, in both directions.

    >>> import torch
    >>> from regard import nn
    >>> layer = torch.nn.TransformerDecoderLayer(16, 2, batch_first=True)
    >>> nn.replace_attention(layer)
    ['self_attn', 'multihead_attn']
    """
    refuse_no_module("replace_attention: what is given", model)
    found = {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if path and isinstance(module, nn.MultiheadAttention) and not isinstance(module, DropIn)
    }
    if not found:
        raise RegardError(
            "there is nothing to replace in this model",
            got=type(model).__name__,
            accepted="a model that contains nn.MultiheadAttention",
        )
    # All or none: one that cannot be replaced is refused before any is replaced.
    made = {module: DropIn.of(module) for module in found.values()}
    for path, module in found.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, made[module])
    return list(found)
