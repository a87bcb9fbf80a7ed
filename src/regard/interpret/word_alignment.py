"""Which words of two texts belong together: links from cross-attention, and how wrong they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regard.arguments import described, flag, is_number, refuse_no_list
from regard.errors import RegardError
from regard.interpret.rows import Heads, Run, choose, together
from regard.seen import Layer
from regard.values import whole

Link = tuple[int, int]
"""A word of the target and a word of the source, both counted from 0."""
Way = Literal["target", "source", "both"]


def alignment_error_rate(
    found: Iterable[Link], sure: Iterable[Link], possible: Iterable[Link] | None = None
) -> float:
    """How wrong an alignment is, from 0, by a gold alignment of sure and possible links (Och and
    Ney): 1 − (|A∩S| + |A∩P|) / (|A| + |S|).

    Every sure link is possible too, whether `possible` has it or not. Without `possible` this is
    one less the F-measure.

    >>> alignment_error_rate([(0, 0), (1, 2)], sure=[(0, 0)], possible=[(1, 2)])
    0.0
    >>> alignment_error_rate([(0, 0), (1, 1)], sure=[(0, 0), (1, 2)])
    0.5
    """
    answers, certain = _links("found", found), _links("sure", sure)
    allowed = certain | (_links("possible", possible) if possible is not None else set())
    if not answers and not certain:
        raise RegardError(
            "there is nothing to compare",
            got="no links found, and none that are sure",
            accepted="at least one link in one of them",
        )
    right = len(answers & certain) + len(answers & allowed)
    return 1 - right / (len(answers) + len(certain))


def word_links(
    weights: Float[Tensor, "targets sources"],
    *,
    way: Way = "both",
    at_least: float = 0.0,
) -> set[Link]:
    """The links of an alignment, from weights of target words on source words.

    By "target" each target word is linked with the source word it attends to most, by "source" each
    source word with the target word that attends to it most; "both" are the links that both have.
    A link of less weight than `at_least` is none. Of equal weights the first counts.

    >>> sorted(word_links(torch.tensor([[0.8, 0.2], [0.6, 0.4]])))
    [(0, 0)]
    >>> sorted(word_links(torch.tensor([[0.8, 0.2], [0.6, 0.4]]), way="target"))
    [(0, 0), (1, 0)]
    """
    if not isinstance(weights, Tensor) or weights.ndim != 2 or not weights.numel():
        raise RegardError(
            "links are made of the weights of target words on source words",
            got=described(weights),
            accepted="a tensor [targets, sources], at least one of each",
        )
    if way not in ("target", "source", "both"):
        raise RegardError(
            "way= says which side chooses its link",
            got=repr(way),
            accepted='"target", "source" or "both"',
        )
    if not is_number(at_least):
        raise RegardError("at_least= is a weight", got=described(at_least), accepted="a number")
    weights = weights.detach().cpu()
    if weights.is_complex() or bool(weights.isnan().any()):
        raise RegardError(
            "links are made of weights that can be compared",
            got="complex numbers" if weights.is_complex() else "NaN",
            accepted="numbers",
        )
    weights = weights.byte() if weights.dtype == torch.bool else weights
    rows, columns = weights.argmax(1).tolist(), weights.argmax(0).tolist()
    by_target, by_source = set(enumerate(rows)), {(row, k) for k, row in enumerate(columns)}
    links = {"target": by_target, "source": by_source, "both": by_target & by_source}[way]
    return {link for link in links if float(weights[link]) >= at_least}


def word_alignment(
    seen: Mapping[str, Layer],
    targets: Sequence[Sequence[int]],
    sources: Sequence[Sequence[int]],
    heads: Heads | None = None,
    *,
    layers: str | Sequence[str] = "*.encoder_attn",
    way: Way = "both",
    at_least: float = 0.0,
    predicts: bool = True,
    batch: int = 0,
) -> set[Link]:
    """Which target word belongs to which source word, from the cross-attention of a translator that
    was watched with `keep="traces"`.

    `targets` and `sources` are words, each as the places of its tokens among those that the decoder
    and the encoder were given. A token of the target is explained by the row that predicts it, that
    of the token before; `predicts=False` takes the row that reads it. A word has the mean of its
    tokens' rows, and of each row the sum over a source word's tokens. `heads` are pairs (layer,
    head), all by default, and are averaged; the layers are those whose path matches `layers`.

    Only the rows and columns of these words are computed.
    """
    shift = int(flag("predicts", predicts))
    targets, sources = _words("targets", targets), _words("sources", sources)
    rows = sorted({place - shift for word in targets for place in word})
    keys = sorted({place for word in sources for place in word})
    if not rows or not keys or not all(map(len, targets)) or not all(map(len, sources)):
        raise RegardError(
            "words are the places of their tokens",
            got=f"{len(targets)} target words, {len(sources)} source words",
            accepted="lists of places, none of them empty: [[1], [2, 3]]",
        )
    if rows[0] < 0 or keys[0] < 0:
        raise RegardError(
            "a place is counted from 0, and the first token of a target is predicted by no row",
            got=f"targets={[list(word) for word in targets][:4]}",
            do="begin with the token after the decoder's first, or say predicts=False",
        )
    matrices = []
    for path, which in choose(seen, layers, heads).items():
        run = Run(seen[path])
        if keys[-1] >= run.keys[0]:
            raise RegardError(
                "the source does not have such a token",
                got=f"place {keys[-1]}",
                accepted=f"0 to {run.keys[0] - 1}",
            )
        every = range(rows[0], rows[-1] + 1)
        matrices.append(run.weights(every, keys=keys, heads=which, batch=batch))
    tokens = together(matrices).mean(0)
    by_row = torch.stack(
        [tokens[[place - shift - rows[0] for place in word]].mean(0) for word in targets]
    )
    words = torch.stack(
        [by_row[:, [keys.index(place) for place in word]].sum(1) for word in sources], dim=1
    )
    return word_links(words, way=way, at_least=at_least)


def _words(name: str, words: Sequence[Sequence[int]]) -> list[list[int]]:
    refuse_no_list(name, words, "words, each as the places of its tokens: [[1], [2, 3]]")
    for word in words:
        refuse_no_list(f"a word of {name}", word, "the places of its tokens: [2, 3]")
        if len(set(word)) < len(word):
            raise RegardError(f"{name}= names a token twice in a word", got=described(word))
    return [[whole(f"a place of {name}", place) for place in word] for word in words]


def _links(name: str, links: Iterable[Link]) -> set[Link]:
    each = links if isinstance(links, Iterable) else [links]
    listed = [tuple(link) if isinstance(link, Iterable) else (link,) for link in each]
    if not all(len(link) == 2 and all(isinstance(n, int) for n in link) for link in listed):
        raise RegardError(
            f"{name}= are links between words",
            got=repr(listed[:4]),
            accepted="pairs (word of the target, word of the source) of whole numbers",
        )
    return {(link[0], link[1]) for link in listed}
