"""Reads texts with a model, and adds up what its heads do, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.backends.contract import SecondPass, Weighed
from regard.inputs import AttentionInputs
from regard.interpret.head_scores.copied_tokens.copying_score import CLEAR, Writing, writing_of
from regard.interpret.head_scores.copied_tokens.guessed_form import Guess
from regard.interpret.head_scores.device_answers import answers
from regard.interpret.head_scores.interruptions import Doubts, Enough, Leaks, Misjudged
from regard.interpret.head_scores.pairs.key_columns import beside, can_be_weighed
from regard.interpret.head_scores.pairs.pair_sums import CallSums, Sum, call_sums
from regard.interpret.head_scores.pairs.pair_totals import Weighed as Weights
from regard.interpret.head_scores.random_weights import FEW
from regard.interpret.head_scores.syntax.arcs import Arc, ArcSums, in_batch, tensor_of
from regard.interpret.head_scores.tally import Tally
from regard.interpret.head_scores.texts.sides import Side, Sides
from regard.interpret.head_scores.texts.text_batches import Batch, Texts
from regard.interpret.interventions.outputs import Place
from regard.interpret.interventions.runs import Runner
from regard.traces import Trace

Progress = Callable[[int, int], None]
Note = Callable[[str, CallSums, Sides, Trace, Weights | None], None]
PROBED = ("previous", "duplicate", "induction")


class Kinds(NamedTuple):
    """Tokens that scores ask about."""

    separators: Int[Tensor, "v"] | None
    rare: Int[Tensor, "v"] | None


class Survey:
    """Texts that are read, and the sums of each layer."""

    def __init__(
        self,
        texts: Texts,
        kinds: Kinds,
        form: Callable[[], Writing],
        guess: Guess | None,
        arcs: dict[int, list[Arc]],
        progress: Progress | None,
        total: int,
    ) -> None:
        self.texts, self.kinds, self.form, self.guess = texts, kinds, form, guess
        self.arcs, self.progress, self.total, self.done = arcs, progress, total, 0
        self.arc_sums = ArcSums()
        self.leaks: list[Tensor] = []
        """For the calls of one batch: whether a row looks at padding."""
        self.sure: list[Tensor] = []
        """And whether float32 was enough for their sums."""
        self.hopeful = True
        """Whether float32 is tried first, and checked for all calls of a batch at its end."""

    def tally(self) -> Tally:
        """Of all texts."""
        return self._read_again(self.texts.model, None, self.form, self.arcs)

    def probed(self, said: Int[Tensor, "b n"] | None, model: nn.Module | None = None) -> Tally:
        """Of tokens that are said twice."""
        tally = Tally(1 if said is None else len(said))
        if said is None:
            return tally
        batch = Batch(said, (Side.of_tokens(said),), torch.arange(len(said)))

        def note(path: str, sums: CallSums, *_: Any) -> None:
            found = {f"probe {name}": sums.scores[name] for name in PROBED if name in sums.scores}
            tally.add(path, batch.numbers, found)

        self._run(self.texts.model if model is None else model, batch, note, {}, self.form())
        try:
            self._settle()
        except Doubts:
            self.hopeful = False
            return self.probed(said, model)
        return tally

    def of(self, model: nn.Module, said: Int[Tensor, "b n"] | None) -> tuple[Tally, Tally]:
        """The same of another model, on some of the texts."""
        many = len(self.texts.calls)
        only = sorted({i * many // min(FEW, many) for i in range(min(FEW, many))})
        writing = self.form()
        if writing.unembedding is not None:
            writing = writing_of(Runner(model), self.texts.sample, list(writing.sizes))
        return self._read_again(model, only, lambda: writing, {}), self.probed(said, model)

    def _read_again(
        self,
        model: nn.Module,
        only: list[int] | None,
        form: Callable[[], Writing],
        arcs: dict[int, list[Arc]],
    ) -> Tally:
        """Read the texts, and again where an assumption turns out to be wrong."""
        done = self.done
        while True:
            try:
                return self._read(model, only, form, arcs)
            except Leaks:
                # Rows see the padding of shorter texts: only texts of one length are run together.
                self.texts.pads = False
            except Doubts:
                self.hopeful = False
            except Misjudged:
                # There is no second guess.
                pass
            self.done, self.leaks, self.sure = done, [], []
            if arcs:
                self.arc_sums = ArcSums()

    def _read(
        self,
        model: nn.Module,
        only: list[int] | None,
        form: Callable[[], Writing],
        arcs: dict[int, list[Arc]],
    ) -> Tally:
        tally = Tally(self.texts.count)
        for batch in self.texts.batches(only):
            guess, self.guess = self.guess, None
            writing = form() if guess is None else guess
            note = partial(self._note, tally, batch, writing)
            self._run(model, batch, note, arcs, writing, tokens=True)
            # While a GPU is still busy with the texts.
            if guess is not None and not guess.holds(form().form):
                raise Misjudged
            self._settle()
            self.done += len(batch.numbers)
            if self.progress is not None:
                self.progress(min(self.done, self.total), self.total)
        tally.settle_offsets()
        return tally

    def _settle(self) -> None:
        """Check the sums of a batch, waiting for the device once."""
        sure, leaks, self.sure, self.leaks = self.sure, self.leaks, [], []
        told = answers([*sure, *leaks])
        if not all(told[: len(sure)]):
            raise Doubts
        if any(told[len(sure) :]):
            raise Leaks

    def _run(
        self,
        model: nn.Module,
        batch: Batch,
        note: Note,
        arcs: dict[int, list[Arc]],
        writing: Writing | Guess,
        *,
        tokens: bool = False,
    ) -> None:
        """Read a batch. With `tokens`, also sum the weight on tokens of some kinds."""
        mine = in_batch(arcs, batch)
        names: dict[Place, tuple[str, ...]] = {}

        def columns(place: Place, x: AttentionInputs, asks: SecondPass) -> Tensor | None:
            path = place[0]
            sides = self.texts.sides_of(batch, path, x) if writing.wants(path) else None
            # Large logits are computed in float64, afterwards.
            if sides is None or mine or not self.hopeful or not can_be_weighed(x, sides):
                return None
            numbers = self._numbers(path, x, asks, sides, writing) if tokens else {}
            names[place], columns = beside(x, sides, numbers)
            return columns

        def look(place: Place, trace: Trace) -> None:
            path = place[0]
            if not writing.wants(path):
                return
            sides = self.texts.sides_of(batch, path, trace.inputs)
            fits = bool(mine) and sides.own and sides.query is batch.sides[0]
            asked = tensor_of(mine, trace.inputs.q.device) if fits else None
            weighed = None
            if isinstance(trace.rows, Weighed):
                weighed = dict(zip(names[place], trace.rows.columns.unbind(-1), strict=True))
            sums = call_sums(trace.detach(), sides, asked, weighed=weighed, hopeful=self.hopeful)
            if sums.sure is not None:
                self.sure.append(sums.sure)
            if sums.arcs is not None:
                self.arc_sums.add(path, mine, sums.arcs)
            note(path, sums, sides, trace, weighed)
            if writing.is_last(place):
                raise Enough

        # The rest of the model, after the last layer asked about, is not run.
        with suppress(Enough):
            Runner(model).run(batch.call, look=look, columns=columns)

    def _note(
        self,
        tally: Tally,
        batch: Batch,
        writing: Writing | Guess,
        path: str,
        sums: CallSums,
        sides: Sides,
        trace: Trace,
        weighed: Weights | None,
    ) -> None:
        index, key = batch.numbers, sides.key
        if key.padded:
            self.leaks.append(sums.on_keys(~key.real[:, None]).sum() > 0)
        # Windows or frames of one text count as its rows.
        parts = len(sums.rows) // len(index)
        index = index if parts == 1 else index.repeat_interleave(parts)
        if sums.offsets is not None:
            tally.add_offsets(path, index, sums.offsets)
        if sums.received is not None or weighed is None:
            x, asks = trace.detach().inputs, trace.second_pass
            numbers = self._numbers(path, x, asks, sides, writing)
            weighed = {name: sums.on_keys(each.double()) for name, each in numbers.items()}
        tally.add(path, index, sums.scores | self._of_tokens(sums, sides, weighed))

    def _of_tokens(self, sums: CallSums, sides: Sides, weighed: Weights) -> dict[str, Sum]:
        """Scores by the tokens that get the weight."""
        # A sink takes some of the weight. Calls with weighed columns have no sink.
        fell = sums.rows if sums.received is None else sums.received.sum(-1)
        of = {"separator": sums.rows, "copying": fell, "suppression": fell, "own logit": fell}
        if self.kinds.rare is not None and sides.key.ids is not None:
            on, real = sides.key.among(self.kinds.rare), sides.key.real
            of["rare"] = sums.rows * (on.sum(-1, keepdim=True) / real.sum(-1, keepdim=True))
        return {name: (weighed[name], of[name]) for name in of if name in weighed}

    def _numbers(
        self,
        path: str,
        x: AttentionInputs,
        asks: SecondPass,
        sides: Sides,
        writing: Writing | Guess,
    ) -> dict[str, Tensor]:
        """For each key: whether its token is of some kind, and how high the token's own logit is in
        what a head writes when it looks at it."""
        key, found = sides.key, dict[str, Tensor]()
        if key.ids is None:
            return found
        if self.kinds.separators is not None:
            found["separator"] = key.among(self.kinds.separators)[:, None]
        if self.kinds.rare is not None:
            found["rare"] = key.among(self.kinds.rare)[:, None]
        if writing.unembedding is None or not sides.own:
            return found
        projection = writing.projection(path, x.shape.H * x.v.shape[-1])
        if projection is None:
            return found
        stands = writing.unembedding.own_logit(x, asks, projection, key.ids)
        return found | {
            "copying": stands > CLEAR, "suppression": stands < -CLEAR, "own logit": stands
        }  # fmt: skip
