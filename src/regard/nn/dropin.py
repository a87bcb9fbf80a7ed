"""`MultiHeadAttention` in the place of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard import biases, masks
from regard.biases.bias import Bias
from regard.errors import RegardError
from regard.masks import Mask
from regard.nn.loading import from_torch, renamed
from regard.nn.multihead import MultiHeadAttention


class _NotForKernels:
    """Stands where PyTorch's encoder looks for the fused weights.

    `nn.TransformerEncoder` and its layers hand these weights to a C++ kernel in eval mode and never
    call the attention module. They decline when a weight overrides torch functions, as this does.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return NotImplemented


class DropIn(nn.Module):
    """A `MultiHeadAttention` that is called as PyTorch calls its own, and always is called.

    Takes the arguments of `nn.MultiheadAttention.forward` and gives (output, weights or None), also
    inside `nn.TransformerEncoder` in eval mode. Loads PyTorch's state dicts. Three things differ,
    all of them on purpose: weights are those before dropout; a query that may see nothing gives 0
    and not NaN; and `is_causal=True` is the causal mask itself, `attn_mask` need not repeat it and
    is not looked at.

    >>> import torch
    >>> from regard import nn
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    >>> layer.self_attn = nn.DropIn(nn.from_torch(layer.self_attn), batch_first=True)
    >>> with torch.no_grad():
    ...     layer(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    in_proj_weight = _NotForKernels()
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, attention: MultiHeadAttention, batch_first: bool = False) -> None:
        super().__init__()
        self.attention, self.batch_first = attention, batch_first
        self.embed_dim, self.num_heads = attention.d_model, attention.heads
        hook: Any = self.register_load_state_dict_pre_hook
        hook(_read_torch)

    @property
    def out_proj(self) -> nn.Linear:
        """The output projection, where PyTorch looks for it.

        >>> DropIn(MultiHeadAttention(16, 2)).out_proj
        Linear(in_features=16, out_features=16, bias=False)
        """
        return self.attention.out_proj

    def forward(
        self,
        query: Float[Tensor, "*nb d"],
        key: Float[Tensor, "*mb e"],
        value: Float[Tensor, "*mb f"],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Float[Tensor, "*nb d"], Tensor | None]:
        """As `nn.MultiheadAttention.forward`: True in a mask hides, floats are added to scores."""
        batched = query.ndim == 3
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        memory = None if key is query else self._batch_first(key)
        values = None if value is key else self._batch_first(value)
        if values is not None and memory is None:
            memory = self._batch_first(key)
        mask, bias = _read_masks(None if is_causal else attn_mask, key_padding_mask, self.num_heads)
        if is_causal:
            mask = masks.causal(offset=0) if mask is None else mask & masks.causal(offset=0)
        answer = self.attention(
            self._batch_first(query), memory, values, mask=mask, bias=bias, trace=need_weights
        )
        out, seen = answer if need_weights else (answer, None)
        weights: Tensor | None = None
        if seen is not None:
            weights = seen.weights().to(query.dtype)
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)


def replace_attention(model: nn.Module) -> list[str]:
    """Put a `DropIn` in the place of every `nn.MultiheadAttention` of a model; returns their names.

    Weights are copied into new parameters: make the optimiser afterwards.

    >>> import torch
    >>> from regard import nn
    >>> layer = torch.nn.TransformerDecoderLayer(16, 2, batch_first=True)
    >>> nn.replace_attention(layer)
    ['self_attn', 'multihead_attn']
    """
    made: dict[nn.Module, DropIn] = {}
    names = []
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if path and isinstance(module, nn.MultiheadAttention):
            if module not in made:
                made[module] = DropIn(from_torch(module), module.batch_first)
                made[module].training = module.training
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, made[module])
            names.append(path)
    if not names:
        raise RegardError(
            "there is nothing to replace in this model",
            got=type(model).__name__,
            accepted="a model that contains nn.MultiheadAttention",
        )
    return names


def _read_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int
) -> tuple[Mask | None, Bias | None]:
    """Booleans as a mask, floats as a bias: PyTorch's layers turn the first into the second."""
    hidden: dict[str, Tensor] = {}
    added: Tensor | None = None
    if attn_mask is not None:
        if attn_mask.is_floating_point():
            added = attn_mask.reshape(
                -1, heads if attn_mask.ndim == 3 else 1, *attn_mask.shape[-2:]
            )
        else:
            hidden["attn_mask"] = attn_mask
    if key_padding_mask is not None:
        if key_padding_mask.is_floating_point():
            padding = key_padding_mask[:, None, None, :]
            added = padding if added is None else added + padding
        else:
            hidden["key_padding_mask"] = key_padding_mask
    return masks.from_multihead(**hidden, heads=heads), None if added is None else biases.dense(
        added
    )


def _read_torch(module: nn.Module, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    """Let a DropIn load what nn.MultiheadAttention saved."""
    assert isinstance(module, DropIn)
    theirs = ("in_proj_", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.")
    names = [name for name in state if name.startswith(tuple(prefix + part for part in theirs))]
    found = {name.removeprefix(prefix): state.pop(name) for name in names}
    for name, weight in renamed(module.attention, found).items():
        state[f"{prefix}attention.{name}"] = weight
