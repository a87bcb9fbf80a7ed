"""Composition: how much of what a head reads could be what an earlier one wrote.

With W the matrix that head 1 moves the stream by (W_V W_O) and M the one that head 2 reads it by,
the score is ‖W M‖ / (‖W‖ ‖M‖) in Frobenius norms. M is W_Q W_Kᵀ of head 2 for queries (Q), its
transpose for keys (K), W_V W_O for values (V). All are of the rank of a head, so that norms are of
matrices as small as that. (Elhage et al., 2021.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.display import table_html, table_text
from regard.interpret.attribution.attributions import SHOWN
from regard.interpret.attribution.head_matrices import HeadMatrices, head_matrices
from regard.interpret.attribution.model_anatomy import anatomy
from regard.visible import visible

Kind = Literal["Q", "K", "V"]
KINDS: tuple[Kind, ...] = ("Q", "K", "V")


@dataclass(frozen=True, eq=False)
class Compositions:
    """How much heads of later layers could read of what those of earlier ones wrote.

    Prints as a table, the strongest first, and is one in a notebook."""

    layers: tuple[str, ...]
    scores: Mapping[Kind, Float[Tensor, "l h m i"]]
    """From head h of layer l to head i of layer m: Q, K and V; NaN where m is not later, and for
    layers with fewer heads than others."""

    def records(self) -> list[dict[str, Any]]:
        """The pairs of heads as plain values, the strongest first."""
        found = []
        for kind, scores in self.scores.items():
            for l, h, m, i in (~scores.isnan()).nonzero().tolist():
                found.append(
                    {
                        "kind": kind, "from": self.layers[l], "from_head": h,
                        "to": self.layers[m], "to_head": i, "score": float(scores[l, h, m, i]),
                    }
                )  # fmt: skip
        return sorted(found, key=lambda one: -one["score"])

    def _table(self) -> list[list[str]]:
        rows = [["from", "to", "of", "score"]]
        for one in self.records()[:SHOWN]:
            start = f"{visible(one['from'])} head {one['from_head']}"
            end = f"{visible(one['to'])} head {one['to_head']}"
            rows.append([start, end, one["kind"], f"{one['score']:.3f}"])
        return rows

    def _notes(self) -> list[str]:
        means = ", ".join(f"{k} {float(s.nanmean()):.3f}" for k, s in self.scores.items())
        return [f"mean of all pairs: {means}; pairs of random matrices have one above 0, too"]

    def __repr__(self) -> str:
        return table_text(self._table(), self._notes())

    def _repr_html_(self) -> str:
        """The same as the last line of a notebook's cell."""
        return table_html(self._table(), header=True, numbers=True, notes=self._notes())


@torch.no_grad()
def compositions(
    model: nn.Module,
    matrices: Mapping[str, HeadMatrices] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Compositions:
    """The Q-, K- and V-composition scores of all pairs of heads in different layers.

    `matrices` are those of each layer, first to last, if the names of a model's projections are not
    known. Norms between heads, rotary positions and networks are left out.
    `progress(done, total)` is called with numbers of layers.

    >>> from regard import interpret, models
    >>> model = models.load("regard-small", device="cpu").model
    >>> found = interpret.compositions(model)
    >>> found.scores["K"].shape
    torch.Size([8, 8, 8, 8])
    """
    if matrices is None:
        paths = anatomy(model).attentions
        matrices = {path: head_matrices(model, path) for path in paths}
    every = [_expanded(one) for one in matrices.values()]
    most = max(len(one.q) for one in every)
    shape = len(every), most, len(every), most
    scores = {kind: torch.full(shape, math.nan, dtype=torch.float64) for kind in KINDS}
    for l, early in enumerate(every):
        for m, late in enumerate(every[l + 1 :], l + 1):
            of = {"Q": (late.q, late.k.mT), "K": (late.k, late.q.mT), "V": (late.v, late.o)}
            for kind in KINDS:
                found = _scores(early.v, early.o, *of[kind])
                scores[kind][l, : len(early.q), m, : len(late.q)] = found.cpu()
        if progress is not None:
            progress(l + 1, len(every))
    return Compositions(tuple(matrices), scores)


def _expanded(given: HeadMatrices) -> HeadMatrices:
    """Each head with keys and values of its own, in float64."""
    group = len(given.q) // len(given.k)
    q, k, v, o = (t.double() for t in given)
    return HeadMatrices(q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), o)


def _scores(
    a: Float[Tensor, "h m e"], b: Float[Tensor, "h e m"],
    c: Float[Tensor, "i m d"], d: Float[Tensor, "i d m"],
) -> Float[Tensor, "h i"]:  # fmt: skip
    """‖a b c d‖ / (‖a b‖ ‖c d‖) for each pair."""
    middle = torch.einsum("hem,imd->hied", b, c)
    squares = torch.einsum("hied,hef,hifg,igd->hi", middle, a.mT @ a, middle, d @ d.mT)
    return squares.clamp_min(0).sqrt() / (_norms(a, b)[:, None] * _norms(c, d))


def _norms(a: Float[Tensor, "h m e"], b: Float[Tensor, "h e m"]) -> Float[Tensor, "h"]:
    """‖a b‖ for each head."""
    return torch.einsum("hef,hfe->h", a.mT @ a, b @ b.mT).clamp_min(0).sqrt()
