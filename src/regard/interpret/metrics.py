"""What interventions are judged by: numbers made of a model's output.

Any function of the output will do, if it gives one number, or one for each sequence of the batch.
Those here know the text and the unchanged output as well.

Places count from the start of the tensors; negative ones from the last token of each text that is
no padding, where the text has an attention_mask. A place that is padding in a text is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from regard.arguments import described
from regard.errors import RegardError
from regard.traces import Trace

Token = int | Tensor
"""A token, or one for each sequence of the batch."""


class Outcome(NamedTuple):
    """What a run gave, for which text, and what the unchanged model gave for it."""

    output: Any
    text: Any
    clean: Any


@dataclass(frozen=True)
class Metric:
    """A number for each sequence, and what it is called."""

    name: str
    of: Callable[[Outcome], Float[Tensor, "b"]]


def logit_difference(right: Token, wrong: Token, at: int = -1) -> Metric:
    """How much more the model says one token than another, in logits, at a place.

    >>> import torch
    >>> measured(logit_difference(2, 0), Outcome(torch.tensor([[[1.0, 2.0, 5.0]]]), None, None))
    tensor([4.], dtype=torch.float64)
    """

    def of(outcome: Outcome) -> Tensor:
        logits = _logits_at(outcome, at)
        return _taken(logits, right) - _taken(logits, wrong)

    return Metric("logit difference", of)


def probability(token: Token, at: int = -1) -> Metric:
    """The probability of a token at a place."""

    def of(outcome: Outcome) -> Tensor:
        return _taken(_logits_at(outcome, at).softmax(-1), token)

    return Metric("probability", of)


def log_odds(token: Token, at: int = -1) -> Metric:
    """log p / (1 - p) of a token at a place: how far its logit is ahead of all others together.
    Other than p and log p, it does not saturate where the model is certain.

    >>> import torch
    >>> measured(log_odds(1), Outcome(torch.tensor([[[0.0, 5.0, 0.0]]]), None, None)).exp()
    tensor([74.2066], dtype=torch.float64)
    """

    def of(outcome: Outcome) -> Tensor:
        logits = _logits_at(outcome, at)
        which = tokens_of(token, logits)
        others = logits.scatter(1, which[:, None], -torch.inf).logsumexp(-1)
        return _taken(logits, token) - others

    return Metric("log-odds", of)


def loss(start: int = 0) -> Metric:
    """The mean loss of the text's own next tokens, in nats; of those from a place on. Padding, and
    what is predicted at it, does not count, where the text has an attention_mask. Of an encoder
    and decoder, the text is decoder_input_ids."""

    def of(outcome: Outcome) -> Tensor:
        logits = logits_of(outcome.output)
        ids = _ids(outcome.text, outcome.output)
        if ids.shape != logits.shape[:2]:
            raise RegardError(
                "the loss of a text needs a prediction at each of its tokens",
                got=f"logits {list(logits.shape)} for tokens {list(ids.shape)}",
                do="give a function of the model's output as the metric",
            )
        each = cross_entropy(_wide(logits)[:, :-1].mT, ids[:, 1:], reduction="none")
        real = _real(outcome)
        counted = real[:, 1:] & real[:, :-1]
        counted[:, : max(start - 1, 0)] = False
        if not counted.any(-1).all():
            raise RegardError(
                "the text has no next token to compute a loss for",
                got=f"{ids.shape[1]} tokens with padding, counted from place {start}",
                accepted="two tokens or more, and a start before the last",
            )
        return torch.where(counted, each, 0.0).sum(-1) / counted.sum(-1)

    return Metric("loss", of)


def kl(at: int | None = None) -> Metric:
    """The divergence KL(unchanged ‖ changed) of what is predicted, in nats: the mean over places,
    or at one. It is 0 for the unchanged model. Padding does not count in the mean, where the text
    has an attention_mask."""

    def of(outcome: Outcome) -> Tensor:
        now, then = (
            log_softmax(_wide(logits_of(output)), -1) for output in (outcome.output, outcome.clean)
        )
        each = kl_div(now, then, reduction="none", log_target=True).sum(-1)
        if at is not None:
            return each[_rows(outcome, at)]
        real = _real(outcome)
        return torch.where(real, each, 0.0).sum(-1) / real.sum(-1)

    return Metric("KL", of)


def measured(metric: Any, outcome: Outcome) -> Float[Tensor, "b"]:
    """A metric as numbers, one for each sequence or one for all."""
    return differentiable(metric, outcome).detach().double().cpu()


def differentiable(metric: Any, outcome: Outcome) -> Float[Tensor, "b"]:
    """The same numbers, in the graph of autograd if the output is."""
    if not isinstance(metric, Metric) and not callable(metric):
        raise RegardError(
            "a metric is a function of the output",
            got=described(metric),
            accepted="one of regard.interpret.metrics, or a function",
        )
    found = metric.of(outcome) if isinstance(metric, Metric) else metric(outcome.output)
    asked = "a metric gives a number, or one for each sequence of the batch"
    try:
        numbers = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):
        raise RegardError(
            asked, got=described(found), accepted="a number, or a tensor of them [batch]"
        ) from None
    if numbers.ndim > 1:
        raise RegardError(
            asked,
            got=f"a tensor {list(numbers.shape)}",
            do="take the mean over everything else",
        )
    return numbers.reshape(-1)


def name_of(metric: Any) -> str:
    if isinstance(metric, Metric):
        return metric.name
    name = getattr(metric, "__name__", "metric")
    return "metric" if name == "<lambda>" else name


def logits_of(output: Any) -> Float[Tensor, "b n v"]:
    """The logits in what a model gives: itself, `.logits`, or the first of several."""
    found = getattr(output, "logits", output)
    found = found[0] if isinstance(found, (tuple, list)) and found else found
    if not isinstance(found, Tensor) or found.ndim != 3:
        raise RegardError(
            "this metric reads logits [batch, tokens, vocabulary]",
            got=f"a tensor {list(found.shape)}"
            if isinstance(found, Tensor)
            else type(output).__name__,
            do="give a function of the model's output as the metric",
        )
    return found


def _taken(numbers: Float[Tensor, "b v"], token: Token) -> Float[Tensor, "b"]:
    which = tokens_of(token, numbers)
    return numbers.gather(1, which[:, None])[:, 0]


def tokens_of(token: Token, numbers: Float[Tensor, "b v"]) -> Int[Tensor, "b"]:
    """The token that is meant in each sequence, where there is a number for every token.

    >>> tokens_of(2, torch.zeros(2, 5))
    tensor([2, 2])
    """
    B, V = numbers.shape
    one = isinstance(token, int) and not isinstance(token, bool)
    many = isinstance(token, Tensor) and token.shape in ((), (1,), (B,)) and _whole(token)
    which = torch.as_tensor(token, device=numbers.device) if one or many else None
    if which is None or not bool(((which >= 0) & (which < V)).all()):
        raise RegardError(
            "there is no such token",
            got=f"{which.tolist()}" if which is not None else described(token),
            accepted=f"a whole number from 0 to {V - 1}, or a tensor of {B}, one for each sequence",
        )
    return which.long().expand(B)


def _whole(numbers: Tensor) -> bool:
    return not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)


def real_places(
    text: Any, size: tuple[int, int], name: str = "attention_mask"
) -> Bool[Tensor, "b n"] | None:
    """Which of the last places of a text are no padding, where it says so."""
    mask = text.get(name) if isinstance(text, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    real = mask[:, -size[1] :].bool()
    return real if real.shape == size else None


def places_at(at: int, size: tuple[int, int], real: Bool[Tensor, "b n"] | None) -> Int[Tensor, "b"]:
    """The place in each of some sequences that `at` names. `real` says what is no padding.

    >>> places_at(-1, (2, 4), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool())
    tensor([1, 3])
    """
    B, N = size
    try:
        place = None if isinstance(at, bool) else operator.index(at)
    except TypeError:
        place = None
    if place is None or not -N <= place < N:
        raise RegardError(
            "at= is a place of the text",
            got=repr(at),
            accepted=f"a whole number from {-N} to {N - 1}",
        )
    if real is None:
        return torch.full((B,), place % N)
    ends = N - real.flip(1).int().argmax(1)
    found = ends + place if place < 0 else torch.full_like(ends, place)
    there = real.gather(1, found.clamp_min(0)[:, None])[:, 0] & (found >= 0)
    if not there.all():
        one = int((~there).nonzero()[0])
        own = int(real[one].sum())
        raise RegardError(
            "at= names a place that is padding in one of the texts",
            got=f"at={place}, and text {one} of the batch has {own} tokens of its own",
            accepted="a token of every text; negative places count from the last one of each",
        )
    return found


def real_rows(model: Any, text: Any, path: str, trace: Trace) -> Bool[Tensor, "b q"] | None:
    """Which queries of a layer's call are no padding, where the text says so. Those of an encoder
    and a decoder have a mask each."""
    B, _, Q, _ = trace.inputs.shape
    two = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    side = "decoder_" if two and "decoder" in path.split(".") else ""
    real = real_places(text, (B, Q), f"{side}attention_mask")
    return None if real is None else real.to(trace.inputs.q.device)


def _logits_at(outcome: Outcome, at: int) -> Float[Tensor, "b v"]:
    return _wide(logits_of(outcome.output)[_rows(outcome, at)])


def _wide(logits: Float[Tensor, "*axes v"]) -> Float[Tensor, "*axes v"]:
    """Logits as metrics read them: in float32, or in float64 if they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _rows(outcome: Outcome, at: int) -> tuple[Int[Tensor, "b"], Int[Tensor, "b"]]:
    """Where the logits of a place are, in each sequence."""
    logits = logits_of(outcome.output)
    places = places_at(at, _size(logits), _known_real(outcome)).to(logits.device)
    return torch.arange(len(places), device=logits.device), places


def _real(outcome: Outcome) -> Bool[Tensor, "b n"]:
    """Which places of the logits are no padding."""
    logits, real = logits_of(outcome.output), _known_real(outcome)
    real = torch.ones(_size(logits), dtype=torch.bool) if real is None else real
    return real.to(logits.device)


def _known_real(outcome: Outcome) -> Bool[Tensor, "b n"] | None:
    """The same, where the text says so."""
    side = _side(outcome.text, outcome.output)
    size = _size(logits_of(outcome.output))
    return real_places(outcome.text, size, f"{side}attention_mask")


def _size(logits: Float[Tensor, "b n v"]) -> tuple[int, int]:
    return logits.shape[0], logits.shape[1]


def _side(text: Any, output: Any) -> str:
    """How arguments begin that are about what is predicted."""
    named = isinstance(text, Mapping) and "decoder_input_ids" in text
    return "decoder_" if named or hasattr(output, "encoder_last_hidden_state") else ""


def _ids(text: Any, output: Any) -> Int[Tensor, "b n"]:
    """The tokens of a text that are predicted."""
    name = f"{_side(text, output)}input_ids"
    if isinstance(text, Mapping):
        ids = text.get(name)
    else:
        ids = text[0] if isinstance(text, (tuple, list)) else text
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise RegardError(
            "the loss of a text needs its tokens",
            got=type(ids).__name__
            if not isinstance(ids, Tensor)
            else f"{ids.dtype} {list(ids.shape)}",
            accepted=f"texts that are tensors of tokens [batch, tokens], or have {name}",
        )
    return ids
