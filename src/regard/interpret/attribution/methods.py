"""What each token did, by one method or another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from regard.arguments import flag
from regard.errors import RegardError
from regard.interpret.attribution.attributions import Attribution
from regard.interpret.attribution.flow import flow
from regard.interpret.attribution.gradients import integrated
from regard.interpret.attribution.output_projections import Output, output_projection
from regard.interpret.attribution.pair_scores import Norms, PairScores, Relevance, blocks
from regard.interpret.attribution.probes import Probe
from regard.interpret.attribution.rollout import refuse_other_places, rollout
from regard.interpret.interventions.outputs import Place
from regard.interpret.metrics import name_of, real_rows
from regard.interpret.rows import matching
from regard.interpret.two_texts import refuse_cross, refuse_two_texts
from regard.traces import Chosen, Trace, places
from regard.values import whole

Method = Literal["weights", "norms", "rollout", "flow", "gradients", "integrated"]
METHODS: tuple[Method, ...] = ("weights", "norms", "rollout", "flow", "gradients", "integrated")
LEARNED = ("gradients", "integrated")
"""Methods that ask what a metric depends on."""
ONE_KIND = "name layers of one kind in layers="
RealRows = Callable[[str, Trace], Bool[Tensor, "b q"] | None]
"""Which queries of a call are no padding, where that is known."""


def attribute(
    model: nn.Module,
    text: Any,
    metric: Any = None,
    *,
    method: Method = "gradients",
    queries: Chosen = None,
    layers: str | Sequence[str] = "*",
    positive: bool = False,
    steps: int = 16,
    scaled: Literal["all", "layer"] = "all",
    output: Output | None = None,
    words: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Attribution:
    """How much each token did, as one of several methods has it.

    `text` is what the model is called with: a tensor of tokens, a dictionary of arguments, or
    several in order. `queries` are the rows asked about, all by default but for padding by an
    `attention_mask`; the pairs of chosen ones are in `rows`. `layers` are patterns of paths.
    `words` are names for the tokens.

    - `"weights"`: the weights themselves.
    - `"norms"`: how long what was read is, ‖p v W_O‖; weights beside. `output` finds the output
      projection of a layer whose names are not known.
    - `"rollout"`, `"flow"`: through all layers, as if attention only mixed; of the last place
      that is no padding, unless `queries` are named.
    - `"gradients"`: weight times derivative of `metric`, p · ∂m/∂p, of either sign; with
      `positive=True` only where it is above 0.
    - `"integrated"`: the same added up while weights grow from 0, in `steps`; the sum is what the
      weights do to the metric, and `gap` what it misses. `scaled="all"` scales all layers at once,
      `"layer"` one after the other, while those above look where they like.

    A metric is one of `interpret.metrics`, or a differentiable function of the model's output.
    `progress(done, total)` is called by `"integrated"` and `"flow"`, which take long.

    >>> import torch
    >>> from regard import interpret
    >>> how = {"activation": "gelu", "batch_first": True}
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, **how).eval()
    >>> x = torch.randn(1, 5, 16)
    >>> found = interpret.attribute(model, x, lambda output: output[:, -1, 0], method="integrated")
    >>> found.tokens.shape, bool(found.gap.abs() < 1e-4)
    (torch.Size([1, 5]), True)
    """
    _check(method, metric, positive, scaled, steps)
    probe = Probe(model, text)
    paths = matching(dict.fromkeys(path for path, _ in probe.clean.calls), layers)
    calls = {place: trace for place, trace in probe.clean.calls.items() if place[0] in paths}
    real = partial(real_rows, model, text)
    if method in ("rollout", "flow"):
        return _through_layers(method, calls, queries, words, progress, real)
    if method in LEARNED:
        return _learned(probe, metric, method, calls, queries, positive, steps, scaled, words,
                        progress)  # fmt: skip
    weights = _scored(
        "weights", _OF["weights"], calls, lambda _, trace: PairScores(trace), queries, words, real
    )
    if method == "weights":
        return weights

    def norms(place: Place, trace: Trace) -> Norms:
        H, E = trace.inputs.shape.H, trace.inputs.v.shape[-1]
        return Norms.of(trace, output_projection(model, place[0], H, E, output).weight)

    return _scored("norms", _OF["norms"], calls, norms, queries, words, real, weights=weights)


_OF = {
    "weights": "weight: the sum over queries, heads and layers",
    "norms": "‖p v W_O‖ of all heads together: the sum over queries and layers; weights beside",
    "rollout": "share of a row, if attention only mixed: the mean over queries",
    "flow": "the largest flow from a row to a token: the mean over queries",
}


def _learned(
    probe: Probe,
    metric: Any,
    method: str,
    calls: Mapping[Place, Trace],
    queries: Chosen,
    positive: bool,
    steps: int,
    scaled: str,
    words: Sequence[str] | None,
    progress: Callable[[int, int], None] | None,
) -> Attribution:
    name, explained = name_of(metric), None
    if method == "gradients":
        value, slopes = probe.slopes(metric)
        about = f"weight × derivative of {name}: the sum over queries, heads and layers"
    else:
        together = [list(calls)] if scaled == "all" else [[place] for place in calls]
        slopes, explained = integrated(probe, metric, together, steps, progress)
        value, about = probe.value(metric), f"what weights did to {name}, added up from 0"
    about += "; only what is above 0" if positive else ""

    def relevance(place: Place, trace: Trace) -> Relevance:
        return Relevance(trace, slopes[place], positive)

    # Of some rows, or of one sign, the scores are a part of what they explain. Rows of padding
    # count as far as the metric depends on them.
    whole_sum = queries is None and not positive
    return _scored(
        method, about, calls, relevance, queries, words, lambda *_: None,
        value=value, explained=explained if whole_sum else None,
    )  # fmt: skip


def _scored(
    method: str,
    about: str,
    calls: Mapping[Place, Trace],
    make: Callable[[Place, Trace], PairScores],
    queries: Chosen,
    words: Sequence[str] | None,
    real: RealRows,
    **more: Any,
) -> Attribution:
    """Scores of pairs, added up over queries a few rows at a time."""
    _refuse_other_keys({place: trace.inputs.shape.K for place, trace in calls.items()})
    _refuse_other_words(words, next(iter(calls.values())).inputs.shape.K)
    heads, rows, tokens = {}, {}, []
    for place, trace in calls.items():
        pairs, x = make(place, trace), trace.inputs
        B, H, Q, K = x.shape
        at = _chosen(queries, Q, x.q.device)
        each = torch.zeros(B, H, K, dtype=x.compute_dtype, device=x.q.device)
        every = torch.zeros(B, K, dtype=x.compute_dtype, device=x.q.device)
        kept = []
        counted = real(place[0], trace) if queries is None else None
        for some in blocks(trace, at):
            part = pairs.rows(some)
            part = part if counted is None else part.only(counted[:, some])
            each += part.each.sum(2)
            every += part.together.sum(1)
            kept += [part.each] if queries is not None else []
        heads[place] = each
        tokens.append(every)
        if queries is not None:
            rows[place] = torch.cat(kept, 2)
    return Attribution(method, about, torch.stack(tokens).sum(0), heads, rows, words, **more)


def _through_layers(
    method: str,
    calls: Mapping[Place, Trace],
    queries: Chosen,
    words: Sequence[str] | None,
    progress: Callable[[int, int], None] | None,
    real: RealRows,
) -> Attribution:
    traces = list(calls.values())
    B, _, n, _ = refuse_other_places(traces)
    # Cross-attention mixes places of one text into those of another, also of the same length.
    refuse_two_texts([path for path, _ in calls], ONE_KIND)
    refuse_cross([path for path, _ in calls])
    device = traces[0].inputs.q.device
    (path, _), lowest = next(iter(calls.items()))
    counted = real(path, lowest) if queries is None else None
    last = torch.full((B,), n - 1, device=device) if counted is None else _last(counted)
    at = last.unique() if queries is None else _chosen(queries, n, device)
    _refuse_other_words(words, n)
    rows = rollout(traces, at) if method == "rollout" else flow(traces, at, progress)
    if queries is None:
        # The last place of each sequence.
        rows = rows[torch.arange(B, device=device), torch.searchsorted(at, last), None]
    # One row for all layers: scores are not per head.
    return Attribution(method, _OF[method], rows.mean(1), {}, {("", 0): rows[:, None]}, words)


def _last(counted: Bool[Tensor, "b n"]) -> Int[Tensor, "b"]:
    """The last place of each sequence that is no padding."""
    behind: Tensor = counted.flip(1).int().argmax(1)
    return counted.shape[1] - 1 - behind


def _chosen(queries: Chosen, n: int, device: torch.device) -> Int[Tensor, "r"]:
    at = places(queries, n, "queries", device)
    if not len(at):
        raise RegardError("no query was chosen", accepted="some of them, or None for all")
    return at


def _check(method: str, metric: Any, positive: bool, scaled: str, steps: int) -> None:
    if method not in METHODS:
        raise RegardError(
            "method= is how tokens are scored",
            got=repr(method),
            accepted=", ".join(map(repr, METHODS)),
        )
    if (metric is None) == (method in LEARNED):
        asks = method in LEARNED
        raise RegardError(
            f"{method!r} asks what a metric depends on"
            if asks
            else f"{method!r} knows of no metric",
            got="no metric" if asks else f"metric={name_of(metric)}",
            accepted="a differentiable function of the model's output, or one of interpret.metrics"
            if asks
            else "metric= with method= " + " or ".join(map(repr, LEARNED)),
        )
    if flag("positive", positive) and method not in LEARNED:
        raise RegardError(
            "positive= keeps contributions that raise a metric",
            got=f"method={method!r}, which has no sign",
            accepted=" or ".join(map(repr, LEARNED)),
        )
    if scaled not in ("all", "layer"):
        raise RegardError(
            "scaled= says what is scaled together", got=repr(scaled), accepted='"all" or "layer"'
        )
    if whole("steps", steps) < 1:
        raise RegardError("steps= counts steps from 0 to 1", got=str(steps), accepted="1 or more")


def _refuse_other_keys(keys: Mapping[Place, int]) -> None:
    if len(set(keys.values())) > 1:
        raise RegardError(
            "tokens are scored over layers that look at the same ones",
            got=", ".join(f"{path}: {n} keys" for (path, _), n in keys.items()),
            do=ONE_KIND,
        )
    refuse_two_texts([path for path, _ in keys], ONE_KIND)


def _refuse_other_words(words: Sequence[str] | None, n: int) -> None:
    if words is not None and len(words) != n:
        raise RegardError(
            "words= names every token", got=f"{len(words)} words for {n} tokens", accepted=str(n)
        )
