"""Models that read one sequence and write another: through one vector, or with attention."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import regard
from regard.errors import RegardError
from regard.scores import Score

CELLS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class Translator(nn.Module):
    """What all have: vectors for words on both sides, of one width, and a layer that reads."""

    def __init__(self, sources: int, targets: int, width: int, read: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(sources, width), nn.Embedding(targets, width)
        self.read = nn.Linear(read, targets)

    def forward(
        self, source: Float[Tensor, "b n d"], before: Int[Tensor, "b m"]
    ) -> Float[Tensor, "b m t"]:
        """What may come at each place, from vectors of the source and the words before."""
        raise NotImplementedError

    def look(self, source: Float[Tensor, "b n d"], before: Int[Tensor, "b m"]) -> regard.Trace:
        """How the places of the target attend to those of the source."""
        raise NotImplementedError

    @torch.no_grad()
    def write(self, source: Int[Tensor, "b n"], start: int, length: int) -> Int[Tensor, "b m"]:
        """The likeliest word at each place, given those written so far."""
        said = torch.full((len(source), 1), start)
        for _ in range(length):
            following = self(self.source(source), said)[:, -1].argmax(-1, keepdim=True)
            said = torch.cat([said, following], 1)
        return said[:, 1:]


class Recurrent(Translator):
    """An encoder and a decoder that read word by word; the decoder begins where the encoder ended.

    That one state is all it gets, unless it attends to all states of the encoder: with an
    "additive" score (Bahdanau) or a "dot" product (Luong).
    """

    def __init__(self, cell: str, attention: str, sources: int, targets: int, width: int) -> None:
        super().__init__(sources, targets, width, read=2 * width if attention else width)
        self.encoder, self.decoder = (CELLS[cell](width, width, batch_first=True) for _ in "ed")
        self.attention = attention
        if attention == "additive":
            self.network = regard.nn.AdditiveAttention(width)

    @property
    def score(self) -> Score:
        """How a state of the decoder is compared with those of the encoder."""
        if self.attention == "dot":
            return regard.scores.dot()
        return regard.scores.additive(self.network.Wq, self.network.Wk, self.network.w)

    def forward(
        self, source: Float[Tensor, "b n d"], before: Int[Tensor, "b m"]
    ) -> Float[Tensor, "b m t"]:
        states, memory = self._states(source, before)
        if self.attention:
            # So short that the formula itself is quickest.
            found = regard.attention(states, memory, memory, score=self.score, backend="reference")
            states = torch.cat([states, found], -1)
        logits: Tensor = self.read(states)
        return logits

    def look(self, source: Float[Tensor, "b n d"], before: Int[Tensor, "b m"]) -> regard.Trace:
        states, memory = self._states(source, before)
        return regard.trace(states, memory, memory, score=self.score)

    def _states(self, source: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        memory, last = self.encoder(source)
        states, _ = self.decoder(self.target(before), last)
        return states, memory


class Transformer(Translator):
    """One block that reads all words at once, and one that writes; places are added as waves."""

    def __init__(self, sources: int, targets: int, width: int, heads: int = 4) -> None:
        super().__init__(sources, targets, width, read=width)
        self.encoder = regard.nn.EncoderBlock(width, heads, hidden=2 * width)
        self.decoder = regard.nn.DecoderBlock(width, heads, hidden=2 * width)
        self.norm = nn.LayerNorm(width)

    def forward(
        self, source: Float[Tensor, "b n d"], before: Int[Tensor, "b m"]
    ) -> Float[Tensor, "b m t"]:
        memory = self.encoder(_placed(source))
        logits: Tensor = self.read(self.norm(self.decoder(_placed(self.target(before)), memory)))
        return logits

    def look(self, source: Float[Tensor, "b n d"], before: Int[Tensor, "b m"]) -> regard.Trace:
        memory = self.encoder(_placed(source))
        _, seen = self.decoder(_placed(self.target(before)), memory, trace=True)
        trace: regard.Trace = seen.memory
        return trace


def translator(name: str, sources: int, targets: int, width: int) -> Translator:
    """A model by name: "gru", "gru + additive", "transformer".

    >>> type(translator("lstm + dot", 9, 9, 8)).__name__
    'Recurrent'
    """
    if name == "transformer":
        return Transformer(sources, targets, width)
    cell, _, attention = name.partition(" + ")
    if cell not in CELLS or attention not in ("", "additive", "dot"):
        raise RegardError(
            "there is no model of that name",
            got=repr(name),
            accepted="transformer; or rnn, lstm or gru, alone or with + additive or + dot",
        )
    return Recurrent(cell, attention, sources, targets, width)


def attends(name: str) -> bool:
    """Whether a model of a name has attention.

    >>> attends("gru"), attends("gru + dot"), attends("transformer")
    (False, True, True)
    """
    return name == "transformer" or "+" in name


def _placed(x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
    n, d = x.shape[1:]
    angle = torch.arange(n)[:, None] * 10_000 ** (-torch.arange(0, d, 2) / d)
    return x + torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
