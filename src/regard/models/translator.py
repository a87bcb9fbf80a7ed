"""A small encoder–decoder: one text is read both ways, another is written while looking at it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard import masks
from regard.arguments import counted, refuse_dropout
from regard.masks import Mask
from regard.models.causal import quiet, refuse_long
from regard.models.memory import Memory
from regard.nn import DecoderBlock, EncoderBlock, Rotary


@dataclass(frozen=True)
class TranslatorConfig:
    """The sizes of a `TranslatorModel`; encoder and decoder have `layers` each."""

    vocabulary: int = 4096
    d_model: int = 192
    layers: int = 3
    heads: int = 6
    longest: int = 160
    dropout: float = 0.0
    is_encoder_decoder: bool = True
    """By this name, so that `regard.watch` knows that there are two texts."""

    def __post_init__(self) -> None:
        for name in ("vocabulary", "d_model", "layers", "heads", "longest"):
            counted(name, getattr(self, name))
        refuse_dropout(self.dropout)


class TranslatorModel(nn.Module):
    """Reads `input_ids` both ways, and predicts each token that follows `decoder_input_ids`.

    >>> import torch
    >>> model = TranslatorModel(TranslatorConfig(vocabulary=50, d_model=16, layers=1, heads=2))
    >>> model(torch.tensor([[7, 3, 9, 0]]), torch.tensor([[0, 5]])).shape
    torch.Size([1, 2, 50])
    """

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.config = config
        sizes = (config.d_model, config.heads)
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        encoder = [
            EncoderBlock(*sizes, rotary=Rotary(), dropout=config.dropout)
            for _ in range(config.layers)
        ]
        decoder = [
            DecoderBlock(*sizes, rotary=Rotary(), dropout=config.dropout)
            for _ in range(config.layers)
        ]
        self.encoder, self.decoder = nn.ModuleList(encoder), nn.ModuleList(decoder)
        self.read_norm = nn.LayerNorm(config.d_model, bias=False)
        self.norm = nn.LayerNorm(config.d_model, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for i in range(config.layers):
            quiet(encoder[i], 2 * config.layers)
            quiet(decoder[i], 3 * config.layers)

    def forward(
        self,
        input_ids: Int[Tensor, "b m"] | None,
        decoder_input_ids: Int[Tensor, "b n"],
        *,
        lengths: Int[Tensor, "b"] | None = None,
        encoder_outputs: Float[Tensor, "b m d"] | None = None,
        past_key_values: Memory | None = None,
    ) -> Float[Tensor, "b n v"]:
        """What follows each token of `decoder_input_ids`, as logits.

        `lengths` says how much of each source is not padding. `encoder_outputs` is what `read` gave
        for the source, and spares reading it again; then `input_ids` may be None.
        """
        if encoder_outputs is None:
            assert input_ids is not None, "there is no source to read"
            encoder_outputs = self.read(input_ids, lengths)
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        refuse_long(before + decoder_input_ids.shape[1], self.config.longest)
        x = self.dropout(self.embedding(decoder_input_ids))
        for i, block in enumerate(self.decoder):
            cache = None if past_key_values is None else past_key_values[i]
            x = block(x, encoder_outputs, memory_mask=_padding(lengths), cache=cache)
        logits: Tensor = nn.functional.linear(self.norm(x), self.embedding.weight)
        return logits

    def read(
        self, input_ids: Int[Tensor, "b m"], lengths: Int[Tensor, "b"] | None = None
    ) -> Float[Tensor, "b m d"]:
        """The source, understood: what the decoder looks at."""
        refuse_long(input_ids.shape[1], self.config.longest)
        x = self.dropout(self.embedding(input_ids))
        for block in self.encoder:
            x = block(x, mask=_padding(lengths))
        read: Tensor = self.read_norm(x)
        return read

    def memory(self) -> Memory:
        """An empty one, for `past_key_values`."""
        return Memory(self.config.layers)

    @torch.no_grad()
    def written(self, input_ids: Int[Tensor, "1 m"], tokens: int, mark: int) -> Int[Tensor, "1 n"]:
        """The likeliest target, from its mark on; it ends with a mark, or after so many tokens."""
        source, memory = self.read(input_ids), self.memory()
        ids = new = input_ids.new_full((1, 1), mark)
        for _ in range(min(tokens, self.config.longest)):
            logits = self(None, new, encoder_outputs=source, past_key_values=memory)
            new = logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], 1)
            if int(new) == mark:
                break
        return ids


def _padding(lengths: Tensor | None) -> Mask | None:
    return None if lengths is None else masks.padding(lengths)
