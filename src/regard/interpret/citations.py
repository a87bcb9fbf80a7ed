"""Which passages a generated token drew on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.arguments import refuse_no_list
from regard.errors import RegardError
from regard.interpret.rows import Heads, Run, choose, together
from regard.seen import Layer
from regard.values import whole


class Citation(NamedTuple):
    """A passage, by its number, and its share of the attention."""

    passage: int
    share: float


@dataclass(frozen=True)
class Citations:
    """For each token of an answer, the share of attention that fell on each passage."""

    shares: Float[Tensor, "tokens passages"]
    """The mean over heads. A row sums to less than 1: the rest fell on the question, on the answer
    so far, and on the first token, where heads that find nothing put their attention."""

    def top(self, n: int = 1) -> list[list[Citation]]:
        """The n passages each token drew on most, the first one first."""
        if whole("top: n", n) < 0:
            raise RegardError("top counts passages", got=str(n), accepted="0 or more")
        values, indices = self.shares.topk(min(n, self.shares.shape[1]), dim=1)
        return [
            [Citation(*found) for found in zip(row, share, strict=True)]
            for row, share in zip(indices.tolist(), values.tolist(), strict=True)
        ]

    def over(self, tokens: slice | range) -> list[Citation]:
        """What a span of tokens drew on together: all passages, the first one first. Those of a
        range beyond the answer are left out."""
        many = len(self.shares)
        if not isinstance(tokens, (slice, range)) or (
            isinstance(tokens, range) and min(tokens, default=0) < 0
        ):
            raise RegardError(
                "a span is some tokens of the answer",
                got=repr(tokens),
                accepted=f"range({many}) or a part of it, or a slice",
            )
        there = range(many)
        which = there[tokens] if isinstance(tokens, slice) else [i for i in tokens if i < many]
        span = self.shares[list(which)]
        if not len(span):
            raise RegardError(
                "a span needs a token", got=str(tokens), accepted=f"within {len(self.shares)}"
            )
        return Citations(span.mean(0, keepdim=True)).top(self.shares.shape[1])[0]


def citations(
    seen: Mapping[str, Layer],
    passages: Sequence[range],
    *,
    tokens: int | None = None,
    prompt: int | None = None,
    layers: str | Sequence[str] = "*",
    heads: Heads | None = None,
    batch: int = 0,
) -> Citations:
    """The share of attention that each token of an answer gave to each passage.

    `seen` is a run that generated the answer without beams, or read prompt and answer at once.
    `passages` are ranges of places in the prompt. `prompt` is how many tokens stand before the
    answer, `tokens` how many the answer has; by default both are read off the calls, which is right
    after generating. `heads` are pairs (layer, head), the layers counted among those whose path
    matches `layers`; by default all. A token is explained by the row that predicted it, which is
    that of the token before. `batch` is which sequence is meant, where there are several.

    **What this shows, and what it does not.** Attention says from where a layer *read*. It does not
    say that what was read decided the answer: values may be small or cancel, later layers may
    overrule, and beyond the first layers a place also holds what it read from others. A passage
    with hardly any share was hardly read; one with a large share may still not matter. To show that
    it does, take it out and see whether the answer changes. Longer passages and the first token get
    more for being long and first: compare like with like.

    Only the rows of the answer are computed, and only at the passages.

    >>> import torch, regard
    >>> from regard.seen import Seen
    >>> places = torch.tensor([3, 0, 0, 1, 1, 2])         # a first token, then three passages
    >>> k, q = torch.eye(4)[places][None, None], 8 * torch.eye(4)[[0, 1]][None, None]
    >>> seen = Seen()
    >>> seen.layer("self_attn").take(regard.trace(q, k, k), 0, keep=True)
    >>> found = citations(seen, [range(1, 3), range(3, 5), range(5, 6)], prompt=1)
    >>> [[(cited.passage, round(cited.share, 2)) for cited in token] for token in found.top(2)]
    [[(0, 0.96), (1, 0.02)], [(1, 0.96), (0, 0.02)]]
    """
    refuse_no_list("passages", passages, "ranges: [range(3, 40), range(40, 90)]")
    batch = whole("batch", batch)
    tokens = None if tokens is None else whole("tokens", tokens)
    if not passages:
        raise RegardError("there must be a passage to cite", got="none", accepted="ranges")
    of_heads = []
    for path, which in choose(seen, layers, heads).items():
        run = Run(seen[path])
        _refuse_other_sequences(run, batch)
        _refuse_lost_keys(run)
        _refuse_beams(run, batch)
        _check(passages, run)
        keys = [place for passage in passages for place in passage]
        _refuse_other_keys(run, keys, batch)
        start = run.prompt(prompt) - 1
        rows = range(start, run.ends[-1] if tokens is None else start + tokens)
        found = run.weights(rows, keys=keys, heads=which, batch=batch)
        ends = accumulate(len(passage) for passage in passages)
        parts = found.tensor_split(list(ends)[:-1], dim=-1)
        of_heads.append(torch.stack([part.sum(-1) for part in parts], dim=-1))
    return Citations(together(of_heads).mean(0))


def _check(passages: Sequence[range], run: Run) -> None:
    for passage in passages:
        if not isinstance(passage, range):
            raise RegardError(
                "a passage is a range of places in the prompt",
                got=repr(passage),
                accepted="ranges: [range(3, 40), range(40, 90)]",
            )
        if not 0 <= passage.start < passage.stop <= run.keys[0] or passage.step != 1:
            raise RegardError(
                "a passage is a range of places in the prompt",
                got=str(passage),
                accepted=f"ranges of at least one place within range(0, {run.keys[0]}), which "
                f"{run.path!r} had before it at first",
                do="with several kinds of attention, name one in layers=",
            )


def _refuse_other_sequences(run: Run, batch: int) -> None:
    many = min(trace.inputs.shape.B for trace in run.traces)
    if not -many <= batch < many:
        raise RegardError(
            "batch= says which sequence is meant",
            got=str(batch),
            accepted=f"0 to {many - 1}: those of {run.path!r}",
        )


def _refuse_beams(run: Run, batch: int) -> None:
    """The rows of an answer are those of one sequence only while its keys stay its own."""
    for before, after in pairwise(trace.inputs.k for trace in run.traces):
        K = before.shape[-2]
        if after.shape[-2] <= K:
            continue
        if not torch.equal(before[batch], after[batch][..., :K, :]):
            raise RegardError(
                f"sequences changed places in {run.path!r} while generating, as beams do",
                got=f"other keys in the {len(run.traces)} calls of sequence {batch}",
                accepted="an answer that was generated without beams",
                do="read prompt and answer at once: watch model(ids), and say prompt=",
            )


def _refuse_other_keys(run: Run, places: Sequence[int], batch: int) -> None:
    """A cache that is full from the first call on has as many keys in each, and others: those of a
    passage must stay where they were."""
    own: Tensor | None = None
    for trace in run.traces:
        k = trace.inputs.k[batch]
        here = k[:, places] if max(places) < k.shape[1] else None
        if here is None or (own is not None and not torch.equal(here, own)):
            raise _lost_keys(run)
        own = here


def _refuse_lost_keys(run: Run) -> None:
    """A place is a key's index only while nothing was dropped from the front of the cache."""
    before = {K - end for K, end in zip(run.keys, run.ends, strict=True)}
    if len(before) > 1 and len(set(run.keys)) > 1:
        raise _lost_keys(run)


def _lost_keys(run: Run) -> RegardError:
    return RegardError(
        f"{run.path!r} lost its first keys while generating, as caches with a window do",
        got=f"{run.keys[0]} keys at first, {run.keys[-1]} at last, for {run.ends[-1]} tokens",
        do="name other layers in layers=, or read prompt and answer at once",
    )
