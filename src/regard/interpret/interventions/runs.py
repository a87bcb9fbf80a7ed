"""Running a model on texts, as it is and with interventions; several of them in one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from regard.arguments import described
from regard.backends.contract import SecondPass
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.interpret.interventions.intervention import About, Intervention, changed_output
from regard.interpret.interventions.outputs import Place
from regard.traces import Trace
from regard.values import whole
from regard.watching.changed_outputs import Intervening

Look = Callable[[Place, Trace], None]
Columns = Callable[[Place, AttentionInputs, SecondPass], Tensor | None]
TOKENS = 4096
"""Tokens, of all interventions together, that are run at once by default."""
MOST = 32
"""And interventions."""


class _InForce:
    """Interventions that are in force, and the call that they were shown last."""

    def __init__(self) -> None:
        self.about: About | None = None
        self._trace: ReferenceType[Trace] | None = None

    def shown(self, trace: Trace, about: About) -> None:
        self._trace, self.about = ref(trace), about

    def of(self, trace: Trace) -> list[About]:
        """What it does in a call, if it was shown that."""
        here = self._trace is not None and self._trace() is trace
        return [self.about] if here and self.about is not None else []

    def __enter__(self) -> None:
        _IN_FORCE.append(self)

    def __exit__(self, *_: object) -> None:
        _IN_FORCE.remove(self)


_IN_FORCE: list[_InForce] = []
"""Of all threads and models, the outermost first: a call that several are about is told by its
trace."""


@contextmanager
def intervene(model: nn.Module, *interventions: Intervention) -> Iterator[None]:
    """A context in which interventions change the heads of a model.

    Everything else is the model's own, whatever runs it: a forward pass, `generate`, a training
    step. Afterwards, also after an exception, it is as it was. One context inside another adds to
    what is in force.

    >>> import torch
    >>> from regard import interpret
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 16)
    >>> silent = interpret.interventions.Replaced({"self_attn": [0, 3]})
    >>> with torch.no_grad(), interpret.intervene(model, silent):
    ...     without = model(x)
    >>> torch.equal(model(x), without)
    False
    """
    with _intervening(model, [interventions]):
        yield


@contextmanager
def _intervening(
    model: nn.Module,
    together: Sequence[Sequence[Intervention]],
    look: Look | None = None,
    columns: Columns | None = None,
) -> Iterator[None]:
    mine = _InForce()

    def handle(path: str, nth: int, trace: Trace) -> Tensor | None:
        if look is not None:
            look((path, nth), trace)
        mine.shown(trace, About(path, nth, together))
        # Each that is shown the call gives what all so far make of it: that of the last is used.
        return changed_output(trace, [about for one in list(_IN_FORCE) for about in one.of(trace)])

    def columns_of(path: str, nth: int, call: AttentionInputs, asks: SecondPass) -> Tensor | None:
        return None if columns is None else columns((path, nth), call, asks)

    beside = None if columns is None else columns_of
    with mine, Intervening(model, handle, columns=beside) as seen:
        yield
        named = {path for several in together for one in several for path in one.heads}
        missing = sorted(named - set(seen))
        if seen and missing:
            raise RegardError(
                "an intervention names layers in which no attention ran",
                got=", ".join(map(repr, missing)),
                accepted=", ".join(map(repr, seen)),
            )


class Runner:
    """A model that is run on a text."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise RegardError(
                "interventions need a model", got=type(model).__name__, accepted="torch.nn.Module"
            )
        if model.training:
            raise RegardError(
                "the model is in training mode, in which runs may differ by chance",
                got=f"{type(model).__name__}.training is True",
                do="call model.eval() first",
            )
        self.model = model

    def rounding(self, share: float) -> float:
        """The share that numbers of this model may differ by, from one of float32."""
        kinds = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        return max([share, *(4 * torch.finfo(kind).eps for kind in kinds)])

    @torch.no_grad()
    def run(
        self,
        text: Any,
        together: Sequence[Sequence[Intervention]] = ((),),
        look: Look | None = None,
        columns: Columns | None = None,
    ) -> Any:
        """The model's output for a text, which is given once for each of several interventions.
        `columns` are asked for calls that are about to run, as `Intervening` does."""
        args, kwargs = arguments(text, len(together))
        with _intervening(self.model, together, look, columns):
            return self.model(*args, **kwargs)


def arguments(text: Any, times: int = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with for a text, so many times in one batch."""

    def repeated(given: Any) -> Any:
        if times == 1 or not isinstance(given, Tensor) or not given.ndim:
            return given
        return torch.cat([given] * times)

    if isinstance(text, Mapping):
        return (), {name: repeated(given) for name, given in text.items()}
    given = text if isinstance(text, (tuple, list)) else (text,)
    return tuple(map(repeated, given)), {}


def items(texts: Any) -> list[Any]:
    """The texts, each as a model takes it: a tensor, arguments by name, or several in order."""
    if isinstance(texts, (Tensor, Mapping)):
        return [texts]
    if isinstance(texts, tuple) and len(texts) > 1 and isinstance(texts[0], Tensor):
        raise RegardError(
            "a tuple of tensors could mean two things: one text whose arguments are in order, or "
            "several texts",
            got=f"{len(texts)} tensors in a tuple",
            do="say which: [(a, b)] for one text, list(texts) for several",
        )
    listed = list(texts) if isinstance(texts, Iterable) else []
    if not listed or any(isinstance(one, str) for one in listed):
        raise RegardError(
            "texts are what the model is called with",
            got="strings" if listed else described(texts),
            accepted="a list of tensors of tokens, or of dictionaries of arguments; or one of them",
            do=""
            if not listed
            else 'tokenize them: [tokenizer(t, return_tensors="pt") for t in …]',
        )
    return listed


def sequences(text: Any) -> int:
    """How many sequences a text is a batch of."""
    found = [t.shape[0] for t in _tensors(text) if t.ndim]
    return found[0] if found else 1


def at_once(text: Any, batch: int | None) -> int:
    """How many interventions are run in one batch."""
    tensors = _tensors(text)
    if batch is not None:
        if whole("batch", batch) < 1:
            raise RegardError(
                "batch= counts interventions that run at once", got=str(batch), accepted="1 or more"
            )
        return batch if _repeatable(text) else 1
    if not _repeatable(text):
        return 1
    first = tensors[0]
    tokens = first.shape[0] * (first.shape[1] if first.ndim > 1 else 1)
    return max(1, min(MOST, TOKENS // max(tokens, 1)))


def _repeatable(text: Any) -> bool:
    """Whether a text is made of tensors of equally many sequences, and of plain values."""
    args, kwargs = arguments(text)
    every = [*args, *kwargs.values()]
    plain = all(isinstance(one, (Tensor, int, float, bool, str, type(None))) for one in every)
    sizes = {t.shape[0] if t.ndim else -1 for t in every if isinstance(t, Tensor)}
    return plain and len(sizes) == 1 and -1 not in sizes


def _tensors(text: Any) -> list[Tensor]:
    args, kwargs = arguments(text)
    return [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]


def parts(output: Any, many: int) -> list[Any] | None:
    """The output for each intervention of a batch; None where it cannot be separated."""
    if many == 1:
        return [output]
    if not isinstance(output, (Tensor, Mapping, tuple, list)):
        return None
    found = [_part(output, place, many) for place in range(many)]
    return None if any(part is _NONE for part in found) else found


_NONE = object()


def _part(output: Any, place: int, many: int) -> Any:
    if isinstance(output, Tensor):
        if not output.ndim or output.shape[0] % many:
            return _NONE
        return output.unflatten(0, (many, -1))[place]
    if isinstance(output, Mapping):
        inside = {name: _part(given, place, many) for name, given in output.items()}
        whole = all(part is not _NONE for part in inside.values())
        return type(output)(**inside) if whole else _NONE
    if isinstance(output, (tuple, list)):
        listed = [_part(given, place, many) for given in output]
        if any(one is _NONE for one in listed):
            return _NONE
        return type(output)(*listed) if hasattr(output, "_fields") else type(output)(listed)
    # A cache of keys and the like: no metric is made of it.
    return _NONE if is_dataclass(output) else output
