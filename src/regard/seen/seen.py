"""What was seen while a model ran: for each attention layer, its calls and what its heads did."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple, Protocol, overload, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from regard.display import Displayed, table_text
from regard.errors import RegardError
from regard.seen.joint_trace import joined as _joined
from regard.seen.statistics import Shared, Statistics, Waiting
from regard.traces import Trace
from regard.visible import visible

Tokens = Sequence[str] | Sequence[Sequence[str]]


@runtime_checkable
class Traces(Protocol):
    """A list of traces, or what passes for one: a file reads them when they are asked for."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Trace]: ...
    @overload
    def __getitem__(self, call: int, /) -> Trace: ...
    @overload
    def __getitem__(self, call: slice, /) -> list[Trace]: ...


@runtime_checkable
class Growing(Traces, Protocol):
    """Traces that take more."""

    def append(self, trace: Trace, /) -> None: ...


class Address(NamedTuple):
    """Where a trace is from: the path of the module, which of its traces it is, the run of the
    model, and the step of generating that the run was."""

    path: str
    call: int
    run: int
    step: int


class Layer:
    """One attention layer: how often it was called, and what its heads did, over all calls."""

    def __init__(
        self,
        path: str,
        calls: int = 0,
        statistics: Statistics | None = None,
        traces: Traces | None = None,
        runs: list[int] | None = None,
        steps: list[int] | None = None,
    ) -> None:
        self.path, self.calls = path, calls
        self.traces: Traces = [] if traces is None else traces
        """One per call, when traces are kept."""
        self.runs: list[int] = [] if runs is None else runs
        """The run of the model, from 0, that each trace is from."""
        self.steps: list[int] = [] if steps is None else steps
        """The step of generating that each trace is from: 0 for a run that begins a text."""
        self.shared: list[tuple[Shared, int]] = []
        """What was added up of its calls together with those of others."""
        self._own = statistics
        self._waiting: Waiting | None = None

    @property
    def statistics(self) -> Statistics | None:
        """Of every call."""
        if self._waiting is not None:
            self._waiting.settle()
        found = self._own
        for shared, place in self.shared:
            more = shared.sums.at(place)
            found = more if found is None else found + more
        return found

    @statistics.setter
    def statistics(self, statistics: Statistics | None) -> None:
        self._own, self.shared = statistics, []

    def take(
        self, trace: Trace, run: int, step: int = 0, *, keep: bool, waiting: Waiting | None = None,
        lasts: bool = False,
    ) -> None:  # fmt: skip
        """Note a call. What its rows saw is added up now, or when those that are `waiting` are;
        then its tensors are copied, unless they stay what they are (`lasts`)."""
        self.calls += 1
        if waiting is None:
            found = Statistics.of(trace)
            self._own = found if self._own is None else self._own + found
        else:
            self._waiting = waiting
            waiting.put(self, trace, lasts=lasts)
        if keep:
            self.keep(trace, run, step)

    def keep(self, trace: Trace, run: int, step: int = 0) -> None:
        """Keep the trace of a call."""
        # Not by isinstance, which asks a protocol for a long time.
        assert hasattr(self.traces, "append"), "the layer of a file takes no more calls"
        self.traces.append(trace)
        self.runs.append(run)
        self.steps.append(step)

    def forget_waiting(self) -> None:
        """Of its calls, and those of layers that were watched with it, what is not added up yet."""
        if self._waiting is not None:
            self._waiting.drop()

    @property
    def addresses(self) -> list[Address]:
        """Where each trace is from."""
        return [Address(self.path, *at) for at in zip(count(), self.runs, self.steps, strict=False)]

    @property
    def heads(self) -> int:
        if self._own is None and self._waiting is None:
            # A file need not have them.
            return self.traces[0].inputs.shape.H if len(self.traces) else 0
        return len(self._sums.rows)

    @property
    def entropy(self) -> Float[Tensor, "h"]:
        """Mean entropy of each head's rows, in nats."""
        sums = self._sums
        return sums.entropy / sums.sound

    @property
    def max_logit(self) -> Float[Tensor, "h"]:
        """The largest logit of each head."""
        return self._sums.max_logit

    @property
    def first(self) -> Float[Tensor, "h"]:
        """The mean share of each head's rows that falls on the first key."""
        sums = self._sums
        return sums.first / sums.sound

    @property
    def trace(self) -> Trace:
        """The trace of the only call."""
        if len(self.traces) == 1:
            return self.traces[0]
        kept = f"{len(self.traces)} traces of {self.calls} calls"
        raise RegardError(
            f"{self.path!r} has not one trace",
            got=kept,
            do='keep them with watch(model, keep="traces"), and choose one of .traces',
        )

    @property
    def joined(self) -> Trace:
        """The steps of generating a text as one trace: that of reading the whole of it at once.

        The last token that was written is not in it, since the model did not read it. With
        several texts, or where steps do not make one trace, choose from `traces`.
        """
        if not len(self.traces):
            raise RegardError(
                f"{self.path!r} has no traces", do='keep them: watch(model, keep="traces")'
            )
        begun = sum(step == 0 for step in self.steps)
        if begun > 1:
            raise RegardError(
                f"{self.path!r} read more than one text",
                got=f"{begun} texts in {len(self.traces)} traces",
                do="choose from .traces, whose .addresses say the run and the step",
            )
        whole = _joined(self.traces[:]) if len(self.traces) > 1 else self.traces[0]
        if whole is None:
            raise RegardError(
                f"the steps of {self.path!r} cannot be joined into one trace",
                got=f"{len(self.traces)} traces: {self.traces[0]!r}, …",
                accepted="attention to what came before, also with a window or padding, or to "
                "another text; keys that stay as they are; no bias",
                do="choose from .traces",
            )
        return whole

    @property
    def _sums(self) -> Statistics:
        found = self.statistics
        if found is None:
            raise RegardError(
                f"{self.path!r} has no statistics",
                got=f"{self.calls} calls, {len(self.traces)} traces",
                do="ask its traces, if there are any",
            )
        return found

    def __repr__(self) -> str:
        kept = f", {len(self.traces)} traces" if self.traces else ""
        return f"Layer({self.path!r}, {self.calls} calls, {self.heads} heads{kept})"


class Seen(Displayed, Mapping[str, Layer]):
    """The layers that were seen, by the path of their module; prints as a table."""

    def __init__(self, model: str = "") -> None:
        self.model = model
        """The name the model was loaded by, or its class."""
        self._tokens: Tokens | Callable[[], Tokens | None] | None = None
        self._layers: dict[str, Layer] = {}

    @property
    def tokens(self) -> Tokens | None:
        """What the sequences said, if the watch had a tokenizer and one text was read, or if it was
        told when they were saved."""
        return self._tokens() if callable(self._tokens) else self._tokens

    @tokens.setter
    def tokens(self, tokens: Tokens | Callable[[], Tokens | None] | None) -> None:
        self._tokens = tokens

    def layer(self, path: str) -> Layer:
        """The layer of a path, new if it was never seen."""
        found = self._layers.get(path)
        return self._layers.setdefault(path, Layer(path)) if found is None else found

    def __getitem__(self, path: str) -> Layer:
        if path not in self._layers:
            known = ", ".join(self._layers) or "none yet: run the model"
            raise RegardError(f"no attention was seen at {path!r}", accepted=known)
        return self._layers[path]

    def __contains__(self, path: object) -> bool:
        return path in self._layers

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def trace(self) -> Trace:
        """The trace of the only call of the only layer, as `Trace.save` writes it."""
        if len(self) == 1:
            return next(iter(self.values())).trace
        raise RegardError(
            "what was seen is not one trace",
            got=f"{len(self)} layers",
            do="choose a layer by its path, then .trace or one of .traces",
        )

    def clear(self) -> None:
        """Forget everything seen so far."""
        for layer in self._layers.values():
            layer.forget_waiting()
        self._layers.clear()

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        tokens: Tokens | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Write everything to a file, which `regard.load` opens.

        `tokens` are the texts of the sequence, or a list of them for each sequence. `progress` is
        told how many bytes are written, of how many. A file of that name is replaced once the new
        one is whole.

        >>> import regard, tempfile, torch
        >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
        >>> with regard.watch(model, keep="traces") as seen:
        ...     y = model(torch.randn(1, 3, 16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     seen.save(f"{folder}/run.safetensors", tokens=["a", "b", "c"])
        ...     with regard.load(f"{folder}/run.safetensors") as again:
        ...         again.tokens, again["self_attn"].trace.weights().shape
        (['a', 'b', 'c'], torch.Size([1, 4, 3, 3]))
        """
        from regard.trace_files import save

        save(self, path, tokens, progress)

    def __repr__(self) -> str:
        if not self._layers:
            return "Seen(nothing yet)"
        head = (
            "layer",
            "calls",
            "heads",
            "max logit",
            "entropy",
            "on first key",
            "empty",
            "broken",
        )
        rows = [head, *(_line(layer) for layer in self._layers.values())]
        return table_text(rows)


def _line(layer: Layer) -> tuple[str, ...]:
    if not layer.heads or layer.statistics is None:
        return visible(layer.path) or "(model)", str(layer.calls), str(layer.heads), *"-----"
    sums = layer._sums
    entropy, first = layer.entropy, layer.first
    share = float((sums.empty / sums.rows).mean())
    return (
        visible(layer.path) or "(model)",
        str(layer.calls),
        str(layer.heads),
        f"{float(layer.max_logit.max()):.3g}",
        f"{float(entropy.mean()):.2f} ({float(entropy.min()):.2f}–{float(entropy.max()):.2f})",
        f"{float(first.mean()):.0%} ({float(first.min()):.0%}–{float(first.max()):.0%})",
        f"{share:.0%}",
        f"{float(sums.broken.sum()):.0f}",
    )
