"""A layer's calls as one run of rows, as if the text had been read at once.

A model that generates calls a layer once for the prompt and once for every token. Row n is that of
the token at place n, and it is the row that predicts the token at place n + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from regard.arguments import described
from regard.errors import RegardError
from regard.seen import Layer
from regard.traces import Chosen, Trace, places
from regard.values import whole

Heads = Sequence[Sequence[int]]
"""Pairs (layer, head). Layers are counted from 0 among those that a pattern names, heads among
those that were watched."""


def choose(
    seen: Mapping[str, Layer], layers: str | Sequence[str], heads: Heads | None
) -> dict[str, list[int]]:
    """The heads asked for, by the path of their layer; every head of every layer for None."""
    if not isinstance(seen, Mapping):
        raise RegardError(
            "seen= is what was seen of a model",
            got=described(seen),
            accepted="what watch or regard.load gives",
        )
    paths = matching(seen, layers)
    for path in paths:
        if not seen[path].traces:
            raise RegardError(
                f"{path!r} has no traces", do='keep them: watch(model, keep="traces")'
            )
    sizes = {path: seen[path].heads for path in paths}
    if heads is None:
        return {path: list(range(many)) for path, many in sizes.items()}
    return numbered(sizes, heads)


def matching(paths: Iterable[str], layers: str | Sequence[str]) -> list[str]:
    """The paths of layers that were seen and are named by a pattern."""
    patterns = [layers] if isinstance(layers, str) else layers
    if not isinstance(patterns, Sequence) or not all(isinstance(one, str) for one in patterns):
        raise RegardError(
            "layers= are patterns of paths",
            got=described(layers),
            accepted="a text, or a list of texts",
        )
    every = list(paths)
    found = [path for path in every if any(fnmatch(path, pattern) for pattern in patterns)]
    if not found:
        raise RegardError(
            "no layer that was seen has such a path",
            got=f"layers={layers!r}",
            accepted=", ".join(every) or "none yet: run the model",
        )
    return found


def numbered(sizes: Mapping[str, int], heads: Heads) -> dict[str, list[int]]:
    """Heads by the path of their layer, from pairs (layer, head); `sizes` says how many each layer
    has."""
    if not isinstance(heads, Sequence):
        raise RegardError("heads= is a list", got=described(heads), accepted="pairs (layer, head)")
    if not len(heads):
        raise RegardError("no head was chosen", accepted="a list of (layer, head), or None for all")
    if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in heads):
        raise RegardError(
            "a head is named with its layer", got=repr(heads), accepted="pairs (layer, head)"
        )
    chosen: dict[str, list[int]] = {}
    paths = list(sizes)
    for pair in heads:
        layer, head = whole("a layer", pair[0]), whole("a head", pair[1])
        if not 0 <= layer < len(paths) or not 0 <= head < sizes[paths[layer]]:
            listed = ", ".join(f"{i}: {sizes[path]}" for i, path in enumerate(paths))
            raise RegardError(
                "no such head was seen",
                got=f"(layer {layer}, head {head})",
                accepted=f"layers with so many heads each: {listed}",
            )
        chosen.setdefault(paths[layer], []).append(head)
    return chosen


class Run:
    """The calls of a layer, one after another; those of a file are read once."""

    def __init__(self, layer: Layer) -> None:
        self.path, self.traces = layer.path, list(layer.traces)
        self.ends = list(accumulate(trace.inputs.shape.Q for trace in self.traces))
        """How many rows there are up to the end of each call."""
        self.keys = [trace.inputs.shape.K for trace in self.traces]

    def prompt(self, given: int | None) -> int:
        """How many tokens come before the first that is asked about: those of the first call, which
        reads the prompt when a model generates, unless it is said."""
        prompt = self.ends[0] if given is None else whole("prompt", given)
        if prompt < 1:
            raise RegardError(
                "prompt= counts the tokens before the first one asked about",
                got=str(prompt),
                accepted="1 or more: each token is predicted by the row of the one before it",
            )
        return prompt

    def weights(
        self, rows: range, *, keys: Chosen, heads: Sequence[int], batch: int
    ) -> Float[Tensor, "h q k"]:
        """The weights of some rows, and of nothing else, from whichever calls hold them."""
        if not 0 <= rows.start < rows.stop <= self.ends[-1]:
            raise RegardError(
                f"{self.path!r} does not have these rows",
                got=f"rows {rows.start} to {rows.stop - 1}",
                accepted=f"0 to {self.ends[-1] - 1}: what its {len(self.traces)} calls hold",
                do="see that prompt= and the tokens are those of the run that was watched",
            )
        found = []
        for trace, end in zip(self.traces, self.ends, strict=True):
            start = end - trace.inputs.shape.Q
            here = range(max(rows.start, start) - start, min(rows.stop, end) - start)
            if here:
                part = _four_axes(trace)[batch, list(heads)]
                found.append(part.weights(queries=here, keys=keys)[0])
        return torch.cat(found, dim=1)


def together(matrices: list[Tensor]) -> Float[Tensor, "h q k"]:
    """The heads of several layers, if these ran over the same tokens."""
    shapes = {tuple(matrix.shape[1:]) for matrix in matrices}
    if len(shapes) > 1:
        raise RegardError(
            "the layers chosen do not run over the same tokens",
            got=" and ".join(f"{q} rows over {k} places" for q, k in sorted(shapes)),
            do="name layers of one kind in layers=",
        )
    return torch.cat(matrices)


def received_from(trace: Trace, queries: Chosen, keys: Chosen) -> Float[Tensor, "b h k"]:
    """What chosen keys got from chosen queries together; a few rows at a time, never n×n."""
    _, _, Q, K = _four_axes(trace).inputs.shape
    columns = places(keys, K, "keys", trace.inputs.q.device)
    if queries is None:
        return trace.detach().received()[..., columns]
    rows = places(queries, Q, "queries", trace.inputs.q.device)
    total = trace.lse.new_zeros(*trace.lse.shape[:2], len(columns))
    for some in rows.split(64):
        total += trace.weights(queries=some, keys=columns).detach().sum(-2)
    return total


def _four_axes(trace: Trace) -> Trace:
    if trace.inputs.rank != 4:
        raise RegardError(
            "this needs a trace that has heads",
            got=f"a trace of {trace.inputs.rank}-D inputs",
            accepted="one of inputs [B, H, N, D]",
        )
    return trace
