"""One shard of a corpus, read by a model: from its number to its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.interpret.head_scores.interruptions import Enough, Leaks
from regard.interpret.head_scores.pairs.pair_sums import call_sums
from regard.interpret.head_scores.pairs.weight_blocks import blocks, open_pairs
from regard.interpret.head_scores.texts.sides import Sides
from regard.interpret.head_scores.texts.text_batches import Batch, Texts
from regard.interpret.interventions.runs import Runner
from regard.interpret.rows import matching
from regard.models.named_models import load
from regard.models.readers import OwnReader, OwnTranslator, Reader
from regard.models.tokenizer import MARK
from regard.scanning import shard_file
from regard.scanning.corpus import Corpus
from regard.scanning.options import Options
from regard.scanning.row_statistics import RowStatistics
from regard.scanning.settings import Settings, manifest
from regard.scanning.states import LayerState, State
from regard.seen import open_places
from regard.traces import Trace

FREE = 8
"""Keys that a row may see at least, to count as extreme: one that sees few has little choice."""
Beat = Callable[[int, int], None]
"""Called with the texts and tokens that were just read."""


@dataclass(frozen=True)
class Job:
    """A scan by names alone, so that any process can take part in it."""

    model: str
    texts: tuple[str, ...]
    folder: str
    options: Options = field(default_factory=Options)
    dtype: str = "auto"
    device: str = "auto"

    def open(self) -> Scanner:
        corpus = Corpus(self.texts)
        reader = load(self.model, dtype=self.dtype, device=self.device)
        return Scanner(reader, corpus, Path(self.folder), self.options)


class Scanner:
    """A model, a corpus, and the folder that the files of shards are in."""

    def __init__(self, reader: Reader, corpus: Corpus, folder: Path, options: Options) -> None:
        if isinstance(reader, OwnTranslator):
            raise RegardError(
                "a model that reads one text and writes another is not scanned",
                got=repr(reader.name),
                accepted="models that read one text",
                do="score its heads on pairs of texts: regard heads",
            )
        self.reader, self.corpus, self.folder, self.options = reader, corpus, folder, options
        begun = manifest(folder) or {}
        self.threads = options.threads or begun.get("threads") or torch.get_num_threads()
        self.settings = Settings.of(reader, corpus, options, self.threads)
        self.hash = self.settings.hash
        self._last: tuple[str, int] | None = None
        self._paths: list[str] = []

    @property
    def shards(self) -> int:
        return self.settings.shards

    def path(self, shard: int) -> Path:
        return self.folder / "shards" / f"{shard:06d}.safetensors"

    def found(self, shard: int) -> State | None:
        """What the file of a shard holds, if it is there and whole."""
        return shard_file.read(self.path(shard), self.hash, shard)

    def scan_shard(self, shard: int, beat: Beat | None = None) -> Path:
        """The file of a shard; it is read only if its file is not there, or not whole."""
        path = self.path(shard)
        if self.found(shard) is None:
            with _settled(self.threads):
                state = self._read(shard, beat)
            shard_file.write(path, state, self.hash, shard)
        return path

    def tokens(self, text: str) -> tuple[list[int], bool]:
        """The tokens of a text that are read, and whether it has more."""
        if isinstance(self.reader, OwnReader):
            ids = [MARK, *self.reader.encode(text)]
        else:
            with self.reader.explained():
                ids = self.reader.tokenizer(text, verbose=False)["input_ids"]
        limits = [n for n in (self.options.max_tokens, self.reader.longest) if n is not None]
        most = min([len(ids), *limits])
        return ids[:most], most < len(ids)

    def as_read(self, number: int) -> str:
        """A text, as far as it was read."""
        (text,) = self.corpus.texts([number])
        ids, cut = self.tokens(text)
        if not cut:
            return text
        if isinstance(self.reader, OwnReader):
            return self.reader.tokenizer.decode(ids[1:])
        return str(self.reader.tokenizer.decode(ids, skip_special_tokens=True))

    def _read(self, shard: int, beat: Beat | None) -> State:
        numbers, calls, cut = list[int](), list[Tensor](), 0
        device = next(self.reader.model.parameters()).device
        chosen = self.corpus.shard(shard, self.shards)
        for number, text in zip(chosen, self.corpus.texts(chosen), strict=True):
            ids, more = self.tokens(text)
            if ids:
                numbers.append(number)
                calls.append(torch.tensor([ids], device=device))
                cut += more
        empty = len(chosen) - len(numbers)
        if not calls:
            return State({}, empty=empty)
        texts = Texts(self.reader, calls)
        self._learn(texts)
        try:
            layers = self._layers(texts, torch.tensor(numbers), beat)
        except Leaks:
            # Rows see the filling of shorter texts: only those of one length are run together.
            texts.pads = False
            layers = self._layers(texts, torch.tensor(numbers), None)
        tokens = sum(call.shape[1] for call in calls)
        return State(layers, len(calls), tokens, cut, empty)

    def _learn(self, texts: Texts) -> None:
        """Which layers there are, and which call is the last: nothing after it is computed."""
        if self._paths:
            return
        calls: list[tuple[str, int]] = []
        with self.reader.explained():
            Runner(texts.model).run(texts.sample, look=lambda place, _: calls.append(place))
        self._paths = list(matching(dict.fromkeys(path for path, _ in calls), self.options.layers))
        self._last = [place for place in calls if place[0] in self._paths][-1]

    def _layers(self, texts: Texts, numbers: Tensor, beat: Beat | None) -> dict[str, LayerState]:
        found: dict[str, LayerState] = {}
        separators = texts.separators() if self.options.roles else None
        for batch in texts.batches():

            def look(place: tuple[str, int], trace: Trace, batch: Batch = batch) -> None:
                path = place[0]
                if path in self._paths:
                    state = self._state(texts, batch, path, trace.detach(), numbers, separators)
                    found[path] = found[path].merged(state) if path in found else state
                if place == self._last:
                    raise Enough

            leaks = False
            with self.reader.explained():
                try:
                    Runner(texts.model).run(batch.call, look=look)
                except Enough:
                    pass
                except Leaks:
                    leaks = True
            if leaks:
                raise Leaks
            if beat is not None:
                beat(len(batch.numbers), int(batch.sides[0].real.sum()))
        return {path: found[path] for path in self._paths if path in found}

    def _state(
        self,
        texts: Texts,
        batch: Batch,
        path: str,
        trace: Trace,
        numbers: Tensor,
        separators: Tensor | None,
    ) -> LayerState:
        x = trace.inputs
        sides = texts.sides_of(batch, path, x)
        if sides.key.padded:
            _refuse_leaks(trace, sides)
        rows = RowStatistics(trace, sides, self.options.statistics)
        roles: dict[str, Tensor] = {}
        if self.options.roles:
            sums = call_sums(trace, sides, also=rows.add if rows.needs_weights else None)
            for name, both in sums.scores.items():
                roles[name] = torch.stack([part.double().sum(0) for part in both], -1)
            if sums.offsets is not None:
                roles["offset"] = torch.stack([p.double().sum(0) for p in sums.offsets], -1)
            if separators is not None and sides.key.ids is not None:
                on = sides.key.among(separators)[:, None].double()
                given = sums.on_keys(on).sum(0)
                roles["separator"] = torch.stack([given, sums.rows.sum(0)], -1)
        elif rows.needs_weights:
            for block in blocks(trace):
                rows.add(block)
        seeing = (trace.rows.max_logit != -torch.inf) & sides.query.real[:, None]
        free = (open_places(x) >= FREE).expand(seeing.shape)
        mine = numbers[batch.numbers].repeat_interleave(len(seeing) // len(batch.numbers))
        return LayerState.of(self.options.statistics, rows.values(), seeing, free, mine, roles)


def _refuse_leaks(trace: Trace, sides: Sides) -> None:
    x = trace.inputs
    q, k = (torch.arange(n, device=x.q.device) for n in (x.shape.Q, x.shape.K))
    padding = sides.query.real[:, :, None] & ~sides.key.real[:, None]
    if bool((open_pairs(x, q, k) & padding[:, None]).any()):
        raise Leaks


@contextmanager
def _settled(threads: int) -> Iterator[None]:
    """How a CPU computes, whatever the process did before: in which order numbers are added up
    depends on threads, and whether the smallest are taken for 0 on a switch."""
    before, flushed = torch.get_num_threads(), not torch.tensor(1e-40).mul(1.0)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)
        torch.set_num_threads(before)
