"""What each head of a model does: on texts, on repeated tokens, and with random weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.arguments import flag, refuse_no_list
from regard.errors import RegardError
from regard.interpret.head_scores.copying import CLEAR, Writing, writing_of
from regard.interpret.head_scores.device_answers import answers
from regard.interpret.head_scores.head_table import Column, HeadRow, HeadScores, OwnScores
from regard.interpret.head_scores.links.link_table import Links
from regard.interpret.head_scores.links.linking import links_of
from regard.interpret.head_scores.pairs.pair_sums import CallSums, Sum, call_sums
from regard.interpret.head_scores.probes import repeats
from regard.interpret.head_scores.random_weights import FEW, shuffled
from regard.interpret.head_scores.score_names import SCORES
from regard.interpret.head_scores.sides import Side, Sides
from regard.interpret.head_scores.syntax.arcs import Arc, ArcSums, arcs_of, in_batch, tensor_of
from regard.interpret.head_scores.tally import Tally
from regard.interpret.head_scores.text_batches import Batch, Texts
from regard.interpret.interventions.runs import Runner
from regard.traces import Trace
from regard.values import whole

Progress = Callable[[int, int], None]
PROBED = ("previous", "duplicate", "induction")


def heads(
    model: Any,
    texts: Any,
    *,
    links: Sequence[Any] = (),
    parses: Sequence[Any] | None = None,
    probes: bool = True,
    random: bool = True,
    separators: Sequence[int] | None = None,
    layers: str | Sequence[str] = "*",
    progress: Progress | None = None,
    seed: int = 0,
) -> HeadScores:
    """What each head of a model does, as scores with plain names.

    `model` is one opened by `regard.models.load`, with `texts` that are strings; or any module that
    `regard.watch` sees, with what it is called with: tensors of tokens, dictionaries of arguments.
    Texts of like length are run together, one layer is looked at after the other, and no n×n is
    built.

    - `links`: pairs such as ("it", "animal"): which heads go from the one to the other, in
      `.links`.
    - `parses`: for each text the place of every token's syntactic head, or (heads, labels): which
      heads follow them, in `.syntax`.
    - `probes`: also let the model read random tokens that are said twice.
    - `random`: also score a copy whose weights are in random order, on 32 texts at most.
    - `separators`: tokens that divide texts; punctuation and special tokens, where a tokenizer
      tells.

    >>> import torch
    >>> from regard.models import CausalConfig, CausalModel
    >>> model = CausalModel(CausalConfig(vocabulary=50, d_model=16, layers=2, heads=2)).eval()
    >>> found = heads(model, [torch.randint(50, (1, 12)) for _ in range(4)])
    >>> len(found), found.best("previous").what.startswith("layer")
    (4, True)
    """
    flag("probes", probes)
    flag("random", random)
    whole("seed", seed)
    refuse_no_list("links", links, 'pairs: [("it", "animal")]')
    if parses is not None:
        refuse_no_list("parses", parses, "for each text the place of the head of every token")
    given = Texts(model, texts)
    if not given.calls:
        raise RegardError("there are no texts", got="none", accepted="one or more")
    notes: list[str] = []
    runner = Runner(given.model)
    writing = writing_of(runner, given.sample, layers)
    sizes, chosen = writing.sizes, list(writing.sizes)
    if writing.why:
        notes.append(f"copying and suppression are not measured: {writing.why}")
    # First: words that do not stand in any text are soon found out.
    linked = links_of(given, links, layers, seed) if len(links) else Links(())
    kinds = Kinds(_separators(given, separators, notes), given.rare() if given.counts() else None)
    if not given.counts():
        notes.append("the texts are no tokens: scores of tokens are not measured")
    arcs: dict[int, list[Arc]] = {}
    for arc in arcs_of(parses, given) if parses is not None else ():
        arcs.setdefault(arc.text, []).append(arc)
    longest = getattr(given.reader, "longest", None)
    said = repeats(given, longest, seed) if probes else None
    if probes and said is None:
        notes.append("repeated tokens are not tried: the model is not called with one text alone")
    total = given.count + (min(FEW, len(given.calls)) if random else 0)
    sweep = Survey(given, kinds, writing, chosen, arcs, progress, total)
    found = sweep.tally()
    probe = sweep.probed(said)
    other_found = other_probe = Tally(1)
    if random:
        other, why = shuffled(given.model, seed)
        if other is None:
            notes.append(f"there is no comparison with random weights: {why}")
        else:
            other_found, other_probe = sweep.of(other, said)
    rows = []
    columns = _columns(found, other_found, seed), _columns(probe, other_probe, seed)
    offsets = found.strongest_offsets()
    for layer, path in enumerate(chosen):
        mine = columns[0].get(path, {}) | columns[1].get(path, {})
        mine = {name: mine[name] for name in SCORES if name in mine}
        strongest = offsets.get(path)
        for head in range(sizes[path].heads):
            offset = None if strongest is None else strongest[head]
            rows.append(HeadRow(layer, head, path, OwnScores(mine, head), offset))
    return HeadScores(
        tuple(rows), tuple(chosen), given.count, linked, sweep.arc_sums.table(), tuple(notes)
    )


class Kinds(NamedTuple):
    """Tokens that are looked for."""

    separators: Int[Tensor, "v"] | None
    rare: Int[Tensor, "v"] | None


class Leaks(Exception):  # noqa: N818  it is no error: texts are then run apart
    """A row looks at padding."""


class Enough(Exception):  # noqa: N818  nor is this
    """All layers that are asked about have run."""


class Survey:
    """Texts that are read, layer after layer added up."""

    def __init__(
        self,
        texts: Texts,
        kinds: Kinds,
        writing: Writing,
        paths: Sequence[str],
        arcs: dict[int, list[Arc]],
        progress: Progress | None,
        total: int,
    ) -> None:
        self.texts, self.kinds, self.writing, self.paths = texts, kinds, writing, set(paths)
        self.arcs, self.progress, self.total, self.done = arcs, progress, total, 0
        self.arc_sums = ArcSums()
        self.leaks: list[Tensor] = []
        """Of the calls of one batch: whether a row looks at padding."""

    def tally(self) -> Tally:
        """Of all texts."""
        try:
            return self._read(self.texts.model, None, self.writing, self.arcs)
        except Leaks:
            # Rows see the filling of shorter texts: only those of one length are run together.
            self.texts.pads, self.done, self.arc_sums = False, 0, ArcSums()
            return self._read(self.texts.model, None, self.writing, self.arcs)

    def probed(self, said: Int[Tensor, "b n"] | None, model: nn.Module | None = None) -> Tally:
        """Of tokens that are said twice."""
        tally = Tally(1 if said is None else len(said))
        if said is None:
            return tally
        batch = Batch(said, (Side.of_tokens(said),), torch.arange(len(said)))

        def note(path: str, sums: CallSums, sides: Sides, trace: Trace) -> None:
            found = {f"probe {name}": sums.scores[name] for name in PROBED if name in sums.scores}
            tally.add(path, batch.numbers, found)

        self._run(self.texts.model if model is None else model, batch, note, {})
        return tally

    def of(self, model: nn.Module, said: Int[Tensor, "b n"] | None) -> tuple[Tally, Tally]:
        """The same of another model, on some of the texts."""
        many = len(self.texts.calls)
        only = sorted({i * many // min(FEW, many) for i in range(min(FEW, many))})
        writing = self.writing
        if writing.unembedding is not None:
            writing = writing_of(Runner(model), self.texts.sample, list(writing.sizes))
        return self._read(model, only, writing, {}), self.probed(said, model)

    def _read(
        self, model: nn.Module, only: list[int] | None, writing: Writing, arcs: dict[int, list[Arc]]
    ) -> Tally:
        tally = Tally(self.texts.count)
        for batch in self.texts.batches(only):

            def note(
                path: str, sums: CallSums, sides: Sides, trace: Trace, batch: Batch = batch
            ) -> None:
                self._note(tally, path, sums, sides, trace, batch, writing)

            self._run(model, batch, note, arcs)
            leaks, self.leaks = self.leaks, []
            if any(answers(leaks)):
                raise Leaks
            self.done += len(batch.numbers)
            if self.progress is not None:
                self.progress(min(self.done, self.total), self.total)
        tally.settle_offsets()
        return tally

    def _run(
        self,
        model: nn.Module,
        batch: Batch,
        note: Callable[[str, CallSums, Sides, Trace], None],
        arcs: dict[int, list[Arc]],
    ) -> None:
        mine = in_batch(arcs, batch)

        def look(place: tuple[str, int], trace: Trace) -> None:
            path = place[0]
            if path not in self.paths:
                return
            sides = self.texts.sides_of(batch, path, trace)
            fits = bool(mine) and sides.own and sides.query is batch.sides[0]
            asked = tensor_of(mine, trace.inputs.q.device) if fits else None
            sums = call_sums(trace.detach(), sides, asked)
            if sums.arcs is not None:
                self.arc_sums.add(path, mine, sums.arcs)
            note(path, sums, sides, trace)
            if place == self.writing.last:
                raise Enough

        # What the model makes of it in the end is not asked for.
        with suppress(Enough):
            Runner(model).run(batch.call, look=look)

    def _note(
        self,
        tally: Tally,
        path: str,
        sums: CallSums,
        sides: Sides,
        trace: Trace,
        batch: Batch,
        writing: Writing,
    ) -> None:
        index, key = batch.numbers, sides.key
        if key.padded:
            self.leaks.append((sums.received * ~key.real[:, None]).sum() > 0)
        # Windows or frames of one text count as its rows.
        parts = len(sums.rows) // len(index)
        index = index if parts == 1 else index.repeat_interleave(parts)
        if sums.offsets is not None:
            tally.add_offsets(path, index, sums.offsets)
        tally.add(path, index, sums.scores | self._of_tokens(path, sums, sides, trace, writing))

    def _of_tokens(
        self, path: str, sums: CallSums, sides: Sides, trace: Trace, writing: Writing
    ) -> dict[str, Sum]:
        """Scores of the tokens that weight falls on."""
        key, found = sides.key, dict[str, Sum]()
        if key.ids is None:
            return found
        if self.kinds.separators is not None:
            on = key.among(self.kinds.separators)[:, None].double()
            found["separator"] = (sums.received * on).sum(-1), sums.rows
        if self.kinds.rare is not None:
            on = key.among(self.kinds.rare).double()
            share = on.sum(-1, keepdim=True) / key.real.sum(-1, keepdim=True)
            found["rare"] = (sums.received * on[:, None]).sum(-1), sums.rows * share
        projection = writing.projections.get(path)
        if projection is None or writing.unembedding is None or not sides.own:
            return found
        stands = writing.unembedding.own_logit(trace.detach(), projection, key.ids).double()
        total = sums.received.sum(-1)
        for name, each in (
            ("copying", stands > CLEAR),
            ("suppression", stands < -CLEAR),
            ("own logit", stands),
        ):
            found[name] = (sums.received * each).sum(-1), total
        return found


def _separators(
    texts: Texts, given: Sequence[int] | None, notes: list[str]
) -> Int[Tensor, "v"] | None:
    if given is not None:
        return torch.as_tensor(list(given), dtype=torch.long)
    found = texts.separators() if texts.counts() else None
    if found is None:
        notes.append("separators are not known: give their tokens as separators=")
    return found


def _columns(found: Tally, other: Tally, seed: int) -> dict[str, dict[str, Column]]:
    """By layer and name, the scores of all heads, beside those with random weights."""
    usual = other.estimates(seed)
    columns: dict[str, dict[str, Column]] = {}
    for path, mine in found.estimates(seed).items():
        theirs = usual.get(path, {})
        columns[path] = {}
        for name, estimates in mine.items():
            known = theirs[name].value if name in theirs else ()
            known = [value for value in known if not math.isnan(value)]
            mean = math.fsum(known) / len(known) if known else math.nan
            columns[path][name] = Column(*estimates, mean, max(known, default=math.nan))
    return columns
