"""Direct logit attribution: what each head writes at a place, read as a logit.

The stream before the last norm is a sum: the embedding, what each head wrote, what each network
wrote, biases. With the scale of that norm as it was, the logit of a token is the sum of what each
of these gives it. What a head does through later layers is not in its own part, but in theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.display import table_html, table_text
from regard.errors import RegardError
from regard.interpret.attribution.attributions import SHOWN, place_named
from regard.interpret.attribution.model_anatomy import (
    Anatomy,
    FrozenNorm,
    anatomy,
    refuse_other_width,
)
from regard.interpret.attribution.output_projections import Output, output_projection
from regard.interpret.attribution.probes import Probe
from regard.interpret.metrics import (
    Token,
    logits_of,
    places_at,
    real_places,
    tokens_of,
)
from regard.visible import visible

NEAR = 1e-2
"""What the parts may miss of the stream, as a share of it, before something else is at work."""


class LogitPart(NamedTuple):
    """What one part of the stream gives the logit, for each sequence."""

    what: str
    path: str
    head: int | None
    """The number of a head; None for what no head wrote."""
    values: Float[Tensor, "b"]


@dataclass(frozen=True, eq=False)
class LogitParts:
    """The parts of a logit, or of the difference of two, in the order they were written.

    Prints as a table, the largest first, and is one in a notebook."""

    about: str
    parts: tuple[LogitPart, ...]
    logit: Float[Tensor, "b"]
    """What the model says."""

    @property
    def gap(self) -> Float[Tensor, "b"]:
        """What the parts do not add up to: rounding."""
        return self.logit - torch.stack([part.values for part in self.parts]).sum(0)

    def heads(self) -> LogitParts:
        """The parts that heads wrote."""
        return replace(self, parts=tuple(p for p in self.parts if p.head is not None))

    def sorted(self) -> LogitParts:
        """The largest first, by their mean over sequences."""
        order = sorted(self.parts, key=lambda part: -abs(float(part.values.mean())))
        return replace(self, parts=tuple(order))

    def records(self) -> list[dict[str, Any]]:
        """The parts as plain values, for JSON or a data frame."""
        return [
            {"what": p.what, "path": p.path, "head": p.head, "values": p.values.tolist()}
            for p in self.parts
        ]

    def _table(self) -> list[list[str]]:
        rows = [
            [visible(part.what), f"{float(part.values.mean()):+.4g}"]
            for part in self.sorted().parts[:SHOWN]
        ]
        return [["written by", "logit"], *rows]

    def _notes(self) -> list[str]:
        left = len(self.parts) - SHOWN
        more = [f"… and {left} more"] if left > 0 else []
        whole = f"{self.about}: {float(self.logit.mean()):.4g}"
        return [*more, f"{whole}; the parts miss {float(self.gap.abs().max()):.1g}"]

    def __repr__(self) -> str:
        return table_text(self._table(), self._notes())

    def _repr_html_(self) -> str:
        """The same as the last line of a notebook's cell."""
        return table_html(self._table(), header=True, numbers=True, notes=self._notes())


def direct_logits(
    model: nn.Module,
    text: Any,
    token: Token | None = None,
    other: Token | None = None,
    *,
    at: int = -1,
    anatomy: Anatomy | None = None,
    output: Output | None = None,
) -> LogitParts:
    """What each head, network and embedding adds to the logit of a token at a place: by default
    of the token that the model predicts. With `other`, to the logit of `token` less that of it.

    A negative `at` counts from the last token of each text that is no padding, where `text` has an
    attention_mask.

    Pass `anatomy` and `output` if the names of the model's parts and output projections are not
    known.

    >>> import torch
    >>> from regard import interpret, models
    >>> model = models.load("regard-small", device="cpu").model
    >>> found = interpret.direct_logits(model, torch.tensor([[5, 6, 7, 8]]))
    >>> len(found.parts), len(found.heads().parts), bool(found.gap.abs() < 1e-3)
    (74, 64, True)
    """
    body = _anatomy(model) if anatomy is None else anatomy
    stream = _Stream(model, text, body, at)
    with stream.listening():
        probe = Probe(model, text)
    refuse_other_width(model, body, stream.last.shape[-1])
    logits = stream.at_place(logits_of(probe.clean.output)).double()
    right = logits.argmax(-1) if token is None else tokens_of(token, logits)
    wrong = None if other is None else tokens_of(other, logits)
    norm = None if body.norm is None else model.get_submodule(body.norm)
    frozen = FrozenNorm(norm, stream.last, stream.read)
    towards, bias = _direction(body, right), _bias(body, right)
    said = logits.gather(1, right[:, None])[:, 0]
    if wrong is not None:
        towards, bias = towards - _direction(body, wrong), bias - _bias(body, wrong)
        said = said - logits.gather(1, wrong[:, None])[:, 0]

    def given(written: Float[Tensor, "b d"]) -> Float[Tensor, "b"]:
        return (frozen.part(written.double()) * towards).sum(-1)

    parts, total = [], torch.zeros_like(stream.last, dtype=torch.float64)
    for what, path, head, written in _written(probe, stream, output):
        parts.append(LogitPart(what, path, head, given(written)))
        total += written.double()
    off = float((total - stream.last.double()).abs().max() / stream.last.double().abs().max())
    if not off < NEAR:
        raise RegardError(
            "what heads and networks write does not add up to the stream of this model",
            got=f"{type(model).__name__}: {off:.0%} off",
            accepted="models in which blocks add what attention and network write to the stream, "
            "as GPT-2, Llama and GPT-NeoX do; not those that normalise, gate or scale it first",
            do="use attribute(method='gradients'), which asks nothing of the model's form",
        )
    constant = (frozen.bias * towards).sum(-1) + bias
    parts.append(LogitPart("last norm and unembedding, bias", body.norm or "", None, constant))
    found = LogitParts(_about(right, wrong, at), tuple(parts), said)
    if not float(found.gap.abs().max()) < NEAR * max(1.0, float(said.abs().max())):
        raise RegardError(
            "the residual stream times the unembedding does not give the model's logits",
            got=f"{type(model).__name__}: {float(found.gap.abs().max()):.3g} off",
            accepted="logits that are the stream times the unembedding: no soft-cap, no scale",
            do="say where the unembedding is: anatomy=interpret.Anatomy(...)",
        )
    return found


class _Stream:
    """The residual stream at a place: what it begins as, what networks add, where it ends."""

    def __init__(self, model: nn.Module, text: Any, body: Anatomy, at: int) -> None:
        if body.network is None:
            raise RegardError(
                "the part of a block that writes beside attention is not known by name",
                got=f"{type(model.get_submodule(body.blocks[0])).__name__}",
                do='name it: dataclasses.replace(interpret.anatomy(model), network="..."), or "" '
                "if there is none",
            )
        self.model, self.text, self.body, self.at = model, text, body, at
        self.networks: dict[str, Tensor] = {}
        self.shape = (0, 0)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it a run is listened to."""
        model, body = self.model, self.body
        with ExitStack() as hooks:

            def on(path: str, hook: Any, *, before: bool = False) -> None:
                module = model.get_submodule(path)
                if before:
                    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                else:
                    handle = module.register_forward_hook(hook)
                hooks.callback(handle.remove)

            on(body.blocks[0], self._begins, before=True)
            for block in body.blocks if body.network else ():
                path = f"{block}.{body.network}"
                on(path, lambda _, __, out, path=path: self._network(path, out))
            if body.norm is None:
                on(body.blocks[-1], lambda _, __, out: self._ends(out, out))
            else:
                on(body.norm, lambda _, given, out: self._ends(given, out))
            yield

    def _begins(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else next(iter(kwargs.values()))
        self.shape = given.shape[0], given.shape[1]
        real = real_places(self.text, self.shape)
        self.places = places_at(self.at, self.shape, real)
        self.first = self._placed(given)

    def _network(self, path: str, out: Any) -> None:
        self.networks[path] = self._placed(out)

    def _ends(self, given: Any, out: Any) -> None:
        self.last, self.read = self._placed(given), self._placed(out)

    def _placed(self, found: Any) -> Float[Tensor, "b d"]:
        stream = found[0] if isinstance(found, (tuple, list)) else found
        B, N = self.shape
        if isinstance(stream, Tensor) and stream.ndim == 2 and len(stream) == B * N:
            stream = stream.unflatten(0, (B, N))
        if not isinstance(stream, Tensor) or stream.ndim != 3:
            raise RegardError(
                "the stream of a model is a vector for each token",
                got=f"a tensor {list(stream.shape)}"
                if isinstance(stream, Tensor)
                else type(found).__name__,
                accepted="[batch, tokens, width]",
            )
        # It is a copy: some models add to the stream in place.
        return self.at_place(stream.detach())

    def at_place(self, found: Float[Tensor, "b n *rest"]) -> Float[Tensor, "b *rest"]:
        """What is at the place that is asked about, of each sequence."""
        # From the end: a model may be asked for its last logits only.
        places = (self.places - self.shape[1]).to(found.device)
        return found[torch.arange(len(places), device=found.device), places]


def _written(
    probe: Probe, stream: _Stream, output: Output | None
) -> Iterator[tuple[str, str, int | None, Float[Tensor, "b d"]]]:
    """What is added up, in order."""
    body = stream.body
    yield "embedding", "", None, stream.first
    for block, attention in zip(body.blocks, body.attentions, strict=True):
        for place, trace in probe.clean.calls.items():
            if place[0] != attention:
                continue
            H, E = trace.inputs.shape.H, trace.inputs.v.shape[-1]
            weight, bias = output_projection(probe.model, attention, H, E, output)
            read = stream.at_place(trace.rows.out.transpose(1, 2)).double()
            written = torch.einsum("bhe,hed->hbd", read, weight.double())
            for h in range(H):
                yield f"{place_named(place)} head {h}", attention, h, written[h]
            if bias is not None:
                yield f"{place_named(place)}, bias", attention, None, bias.expand_as(written[0])
        if body.network:
            path = f"{block}.{body.network}"
            yield path, path, None, stream.networks[path]


def _direction(body: Anatomy, token: Tensor) -> Float[Tensor, "b d"]:
    return body.unembedding[token.to(body.unembedding.device)].double()


def _bias(body: Anatomy, token: Tensor) -> Float[Tensor, "b"]:
    if body.unembedding_bias is None:
        return torch.zeros(len(token), dtype=torch.float64, device=token.device)
    return body.unembedding_bias[token.to(body.unembedding_bias.device)].double()


def _about(right: Tensor, wrong: Tensor | None, at: int) -> str:
    def named(token: Tensor) -> str:
        each: Sequence[int] = sorted(set(token.tolist()))
        return str(each[0]) if len(each) == 1 else f"{len(each)} tokens"

    less = "" if wrong is None else f" less that of token {named(wrong)}"
    return f"logit of token {named(right)}{less} at place {at}"


def _anatomy(model: nn.Module) -> Anatomy:
    return anatomy(model)
