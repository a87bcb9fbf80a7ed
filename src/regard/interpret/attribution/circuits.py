"""The circuits of a head: which tokens it looks for (QK), and what it says when it reads one (OV).

Both are matrices of all pairs of tokens, E W_Q W_Kᵀ Eᵀ / √d and E W_V W_O U, on the direct path: as
if the stream held nothing but the embeddings. They are never built: the largest entries are found a
few rows at a time, and the eigenvalues of the second are those of W_O U E W_V, which is as wide as
a head. (Elhage et al., 2021.)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from regard.arguments import counted, described
from regard.display import table_html, table_text
from regard.errors import RegardError
from regard.interpret.attribution.head_matrices import HeadMatrices, head_matrices
from regard.interpret.attribution.model_anatomy import (
    Anatomy,
    anatomy,
    gain_of,
    refuse_other_width,
)
from regard.interpret.interventions.runs import Runner
from regard.values import whole
from regard.visible import visible

AT_ONCE = 2**22
"""Pairs of tokens that are held at once."""


class TokenPair(NamedTuple):
    """Two tokens, and how strongly a head joins them."""

    first: int
    second: int
    score: float


@dataclass(frozen=True, eq=False)
class Circuit:
    """What a head looks for, and what it writes. Prints as a table."""

    layer: str
    head: int
    looks: tuple[TokenPair, ...]
    """The largest logits: (query, key)."""
    writes: tuple[TokenPair, ...]
    """The largest logits that reading a token gives another: (token read, token said)."""
    eigenvalues: Complex[Tensor, "e"]
    """Of the matrix from tokens read to tokens said, but for zeros."""
    words: Sequence[str] | None = None

    @property
    def copying(self) -> float:
        """Σ Re λ / Σ |λ| of the eigenvalues: 1 if the head raises the logit of what it reads, -1 if
        it lowers it; 0 for a head that writes nothing."""
        size = float(self.eigenvalues.abs().sum())
        return float(self.eigenvalues.real.sum()) / size if size else 0.0

    def records(self) -> list[dict[str, Any]]:
        """The pairs as plain values, for JSON or a data frame."""
        return [
            {"layer": self.layer, "head": self.head, "circuit": name, "copying": self.copying}
            | pair._asdict()
            for name, pairs in (("QK", self.looks), ("OV", self.writes))
            for pair in pairs
        ]

    def _table(self) -> list[list[str]]:
        rows = [["QK: query → key", "logit", "   OV: read → said", "logit"]]
        for look, write in zip(self.looks, self.writes, strict=True):
            cells = [self._named(look), f"{look.score:+.3g}"]
            rows.append([*cells, self._named(write), f"{write.score:+.3g}"])
        return rows

    def _named(self, pair: TokenPair) -> str:
        words = self.words or ()
        # Embeddings are often longer than the vocabulary of a tokenizer.
        first, second = (repr(visible(words[i])) if i < len(words) else str(i) for i in pair[:2])
        return f"{first} → {second}"

    def _notes(self) -> list[str]:
        return [f"{visible(self.layer)} head {self.head}; copying score {self.copying:+.2f}"]

    def __repr__(self) -> str:
        return table_text(self._table(), self._notes())

    def _repr_html_(self) -> str:
        """The same as the last line of a notebook's cell."""
        return table_html(self._table(), header=True, numbers=True, notes=self._notes())


@torch.no_grad()
def circuit(
    model: nn.Module,
    layer: int,
    head: int,
    *,
    top: int = 10,
    tokens: Int[Tensor, "n"] | None = None,
    after: int = 0,
    norms: bool = True,
    words: Sequence[str] | None = None,
    anatomy: Anatomy | None = None,
    matrices: HeadMatrices | None = None,
) -> Circuit:
    """The QK and OV circuits of a head: the `top` pairs of tokens of each, and the copying score.

    `tokens` are those to look at, the whole vocabulary by default. `after` is how many blocks have
    read each of them, alone: 0 for the embeddings themselves. Later heads of trained models often
    read what the first block makes of a token, and copy that. With `norms` the head reads through
    the norm before it, and what it writes goes through the gain of the last norm. Pass `anatomy`
    and `matrices` if the names of a model's parts and projections are not known. It is about the
    matrices alone: biases, and norms of queries and keys, are left out, and so are positions:
    rotary ones count as if all tokens stood at one place. Logits are divided by √d.

    >>> from regard import interpret, models
    >>> model = models.load("regard-small", device="cpu").model
    >>> interpret.circuit(model, 4, 5, top=1, tokens=torch.arange(300, 600), after=1).copying > 0.9
    True
    """
    body = _anatomy(model) if anatomy is None else anatomy
    path = _layer(body, layer)
    every = head_matrices(model, path) if matrices is None else matrices
    counted("top", top, least=0)
    if not 0 <= whole("head", head) < len(every.q):
        raise RegardError(
            f"{path!r} has no such head", got=str(head), accepted=f"0 to {len(every.q) - 1}"
        )
    q, k, v, o = (t[0] for t in every.head(head))
    refuse_other_width(model, body, len(q))
    at = _chosen(tokens, len(body.embedding)).to(body.embedding.device)
    read, written = (
        _read(model, body, layer, at, after, norms),
        _unembedding(model, body, norms)[at],
    )
    looks = _largest(read @ q / q.shape[-1] ** 0.5, read @ k, at, top)
    writes = _largest(read @ v, written @ o.T, at, top)
    small = (written @ o.T).T @ (read @ v)
    return Circuit(path, head, looks, writes, torch.linalg.eigvals(small), words)


def _chosen(tokens: Any, many: int) -> Int[Tensor, "n"]:
    """The tokens to look at; all of a vocabulary by default."""
    if tokens is None:
        return torch.arange(many)
    accepted = f"numbers of 0 to {many - 1} in a row, each a token of the vocabulary"
    try:
        found = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError):
        raise RegardError(
            "tokens= are not numbers", got=described(tokens), accepted=accepted
        ) from None
    if found.ndim != 1 or found.dtype not in (torch.int64, torch.int32) or not len(found):
        raise RegardError(
            "tokens= are the tokens to look at", got=described(found), accepted=accepted
        )
    least, most = int(found.min()), int(found.max())
    if least < 0 or most >= many:
        got = str(least if least < 0 else most)
        raise RegardError("tokens= has what is not in the vocabulary", got=got, accepted=accepted)
    return found.long()


def _read(
    model: nn.Module, body: Anatomy, layer: int, at: Int[Tensor, "n"], after: int, norms: bool
) -> Float[Tensor, "n d"]:
    """Tokens as a layer reads them."""
    stream = body.embedding[at] if after == 0 else _alone(model, body, at, after)
    if not norms or body.attention_norm is None:
        return stream.double()
    norm = model.get_submodule(f"{body.blocks[layer]}.{body.attention_norm}")
    read: Tensor = norm(stream)
    return read.double()


class _EnoughError(Exception):
    """The blocks above need not run."""


def _alone(
    model: nn.Module, body: Anatomy, at: Int[Tensor, "n"], after: int
) -> Float[Tensor, "n d"]:
    """What so many blocks make of each token, read alone."""
    if not 0 < after <= len(body.blocks):
        raise RegardError(
            "after= counts blocks", got=str(after), accepted=f"0 to {len(body.blocks)}"
        )
    model, kept = Runner(model).model, list[Tensor]()

    def keep(_: nn.Module, __: Any, out: Any) -> None:
        kept.append((out[0] if isinstance(out, (tuple, list)) else out)[:, 0].clone())
        raise _EnoughError

    hook = model.get_submodule(body.blocks[after - 1]).register_forward_hook(keep)
    try:
        for some in at.split(1024):
            with suppress(_EnoughError):
                model(some[:, None])
    finally:
        hook.remove()
    return torch.cat(kept)


def _unembedding(model: nn.Module, body: Anatomy, norms: bool) -> Float[Tensor, "v d"]:
    """The unembedding behind the last norm's gain."""
    said = body.unembedding.double()
    if not norms or body.norm is None:
        return said
    gain, _, centres = gain_of(model.get_submodule(body.norm), body.embedding[:1])
    said = said * gain
    return said - said.mean(-1, keepdim=True) if centres else said


def _largest(
    left: Float[Tensor, "n d"], right: Float[Tensor, "n d"], at: Int[Tensor, "n"], top: int
) -> tuple[TokenPair, ...]:
    """The largest entries of left @ right.T, a few rows at a time."""
    n, found = len(right), []
    for rows in torch.arange(len(left), device=left.device).split(max(1, AT_ONCE // max(n, 1))):
        scores, where = (left[rows] @ right.T).flatten().topk(min(top, len(rows) * n))
        found.append((scores, rows[where // n] * n + where % n))
    scores, where = (torch.cat(parts) for parts in zip(*found, strict=True))
    order = scores.argsort(descending=True, stable=True)[:top]
    return tuple(
        TokenPair(int(at[place // n]), int(at[place % n]), score)
        for place, score in zip(where[order].tolist(), scores[order].tolist(), strict=True)
    )


def _layer(body: Anatomy, layer: int) -> str:
    if not 0 <= whole("layer", layer) < len(body.attentions):
        raise RegardError(
            "no such layer", got=str(layer), accepted=f"0 to {len(body.attentions) - 1}"
        )
    return body.attentions[layer]


def _anatomy(model: nn.Module) -> Anatomy:
    return anatomy(model)
