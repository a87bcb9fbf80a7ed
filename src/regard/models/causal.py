"""A small causal language model: embeddings, pre-norm blocks with rotary positions, the same
embeddings again."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard import masks
from regard.arguments import counted, refuse_dropout
from regard.errors import RegardError
from regard.models.memory import Memory
from regard.nn import DecoderBlock, EncoderBlock, MultiHeadAttention, Rotary


@dataclass(frozen=True)
class CausalConfig:
    """The sizes of a `CausalModel`; `longest` is how many tokens it was trained to read."""

    vocabulary: int = 4096
    d_model: int = 256
    layers: int = 8
    heads: int = 8
    longest: int = 512
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "d_model", "layers", "heads", "longest"):
            counted(name, getattr(self, name))
        refuse_dropout(self.dropout)


class CausalModel(nn.Module):
    """Each token reads those before it, and predicts the next.

    >>> import torch
    >>> model = CausalModel(CausalConfig(vocabulary=50, d_model=16, layers=2, heads=2))
    >>> model(torch.tensor([[0, 7, 3]])).shape
    torch.Size([1, 3, 50])
    """

    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        blocks = [
            EncoderBlock(config.d_model, config.heads, rotary=Rotary(), dropout=config.dropout)
            for _ in range(config.layers)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.d_model, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in blocks:
            quiet(block, 2 * config.layers)

    def forward(
        self, input_ids: Int[Tensor, "b n"], past_key_values: Memory | None = None
    ) -> Float[Tensor, "b n v"]:
        """What follows each token, as logits. A `Memory` holds the tokens of calls before."""
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        refuse_long(before + input_ids.shape[1], self.config.longest)
        x = self.dropout(self.embedding(input_ids))
        for i, block in enumerate(self.blocks):
            cache = None if past_key_values is None else past_key_values[i]
            x = block(x, mask=masks.causal(), cache=cache)
        logits: Tensor = nn.functional.linear(self.norm(x), self.embedding.weight)
        return logits

    def memory(self) -> Memory:
        """An empty one, for `past_key_values`."""
        return Memory(self.config.layers)

    @torch.no_grad()
    def continued(
        self,
        ids: Int[Tensor, "1 n"],
        tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        stop: int | None = None,
    ) -> Int[Tensor, "1 m"]:
        """ids and what follows: the likeliest tokens, or drawn ones with a temperature."""
        generator = torch.Generator(ids.device).manual_seed(seed)
        memory, new = self.memory(), ids
        for _ in range(tokens):
            logits = self(new, past_key_values=memory)[:, -1]
            new = drawn(logits, temperature, generator)
            ids = torch.cat([ids, new], 1)
            if stop is not None and int(new) == stop:
                break
        return ids


def quiet(block: EncoderBlock | DecoderBlock, branches: int) -> None:
    """Draw what a block adds to the sum so that the sum does not grow with the number of branches.

    >>> block = EncoderBlock(16, 2)
    >>> quiet(block, 4)
    >>> 0.005 < float(block.attention.out_proj.weight.detach().std()) < 0.015
    True
    """
    attentions = [m for m in block.children() if isinstance(m, MultiHeadAttention)]
    last = block.network[-1]
    assert isinstance(last, nn.Linear)
    for projection in (last, *(attention.out_proj for attention in attentions)):
        nn.init.normal_(projection.weight, std=0.02 / math.sqrt(branches))


def drawn(
    logits: Float[Tensor, "b v"], temperature: float, generator: torch.Generator
) -> Int[Tensor, "b 1"]:
    """The likeliest token of each row, or one drawn by chance.

    >>> drawn(torch.tensor([[0.0, 5.0, 1.0]]), 0.0, torch.Generator())
    tensor([[1]])
    """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    shares = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(shares, 1, generator=generator)


def refuse_long(tokens: int, longest: int) -> None:
    """Say when a model would read more than it was trained to."""
    if tokens > longest:
        raise RegardError(
            "the text is longer than the model can read",
            got=f"{tokens} tokens",
            accepted=f"{longest}",
            do="give a shorter text, or ask for fewer new tokens",
        )
