"""Whether attention weights point at what decided.

CLAIM: A weight says what was read, not what it did. In a trained model weights rank tokens by what
cutting their edges does better than chance, but far from exactly. Multiplying layers (rollout)
makes it worse. What removing a value does is told better by a weight times its derivative, over the
whole model and in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard import interpret, models
from regard.interpret import metrics
from regard.interpret.faithfulness_report.comparison import size_of_effect
from regard.interpret.faithfulness_report.rank_correlation import Interval, over_texts, spearman
from regard.lab.apparatus.experiments import About, Check, Progress, Result, Tell, seeded
from regard.lab.apparatus.panels import Bars, HeatMap, Line, Lines

ABOUT = About(
    name="faithfulness",
    title="Whether attention weights point at what decided",
    claim=(
        "A weight says what was read, not what it did. In a trained model weights rank tokens by "
        "what cutting their edges does better than chance, but far from exactly. Multiplying "
        "layers (rollout) makes it worse. What removing a value does is told better by a weight "
        "times its derivative, over the whole model and in every layer."
    ),
    method=(
        "regard-small, which learned from children's stories, continues some beginnings; then it "
        "is asked what comes next. Every token is scored: by its weight from the last place, the "
        "mean over heads and layers; by the length of what was read from it (value norms); by "
        "rollout; by gradient × attention, p·∂m/∂p, with m the log-odds of the model's own next "
        "token.",
        "Then the token's edges are cut: no later token may look at it, and m is taken again. The "
        "score of a method is the rank correlation of its numbers with the size of that effect, "
        "for each text, and the mean over texts; intervals are of texts drawn anew. It is done "
        "before softmax, when rows look elsewhere instead, and after, when only the value is "
        "missing.",
        "In each layer alone, the edges from the last place are cut after softmax, one by one, and "
        "compared with what that layer's weights, norms and gradients say.",
        "Controls: position alone (the best of nearer first, earlier first and both ends first), "
        "and weights shuffled among tokens.",
    ),
    change=(
        "Cut only the edges from the last place (cuts='last'): why do weights do better?",
        "Take longer texts (tokens=48): does position say more, or less?",
        "Add integrated gradients (more=['integrated']): are they worth their time?",
        "Train the same model with another seed, or read a text of another kind.",
    ),
    full={"texts": 24, "tokens": 28},
    seeds=3,
)
BEGINNINGS = (
    "Once upon a time there was", "One day, Tom and Lily", "There was a little", "Lily had a",
    "The dog was", "Mom said that", "Tom wanted to", "In the park",
)  # fmt: skip
METHODS: tuple[Any, ...] = ("weights", "norms", "rollout", "gradients")
LOCAL = ("weights", "norms", "gradients")
"""Those that a layer has alone."""
EXACT = 0.8
"""The rank correlation below which a guide is said to be far from exact."""


def run(
    *,
    seed: int = 0,
    texts: int = 12,
    tokens: int = 22,
    cuts: str = "token",
    more: Sequence[Any] = (),
    progress: Tell | None = None,
) -> Result:
    """Score the tokens of texts, cut their edges, and compare."""
    step = Progress(4 * texts, progress)
    reader = models.load("regard-small", device="cpu")
    with seeded(seed):
        read = [_written(reader, i, tokens, seed) for i in range(texts)]
        for _ in read:
            step("writing texts")
        whole = {}
        for softmax in ("before", "after"):
            how: Any = {"softmax": softmax, "cuts": cuts, "seed": seed}
            whole[softmax] = interpret.faithfulness(
                reader.model, read, methods=(*METHODS, *more), **how,
                words=[_words(reader, ids) for ids in read],
                progress=lambda done, total: step("cutting edges"),
            )  # fmt: skip
        layers = []
        for ids in read:
            layers.append(by_layer(reader.model, ids))
            step("cutting edges of each layer")
    numbers = {
        "whole": {softmax: found.records() for softmax, found in whole.items()},
        "differences": {s: differences(found, seed) for s, found in whole.items()},
        "layers": {
            name: [
                over_texts(torch.stack([one[name][i] for one in layers])[None], seed)[0]._asdict()
                for i in range(len(layers[0][name]))
            ]
            for name in layers[0]
        },
        "texts": ["".join(text.words) for text in whole["after"].texts],
        "verdicts": {softmax: found.verdict for softmax, found in whole.items()},
        "shown": shown(whole["after"]),
    }
    settings = {"seed": seed, "texts": texts, "tokens": tokens, "cuts": cuts,
                "more": list(more)}  # fmt: skip
    return Result(ABOUT, settings, _checks(numbers), _answer(numbers), numbers, _panels(numbers))


def _written(reader: Any, i: int, tokens: int, seed: int) -> Int[Tensor, "1 n"]:
    """A story of so many tokens, as the model tells it."""
    ids = reader.ids(BEGINNINGS[i % len(BEGINNINGS)])
    told: Tensor = reader.model.continued(
        ids, max(0, tokens - ids.shape[1]), temperature=0.8, seed=1000 * seed + i
    )
    return told[:, :tokens]


def _words(reader: Any, ids: Int[Tensor, "1 n"]) -> list[str]:
    words: list[str] = reader.spelled(ids[0].tolist())
    return words


def by_layer(model: Any, ids: Int[Tensor, "1 n"]) -> dict[str, Float[Tensor, "l"]]:
    """The rank correlation of each layer's own scores with what cutting its edges does."""
    n = ids.shape[1]
    with torch.no_grad():
        metric = metrics.log_odds(int(model(ids)[0, -1].argmax()))
    edges = [(-1, j) for j in range(n - 1)]
    found = interpret.knock_out(model, [ids], metric, edges, each="layer", softmax="after")
    effect = torch.tensor([row.effect for row in found]).view(-1, n - 1).abs()
    scores: dict[str, Tensor] = {}
    for method in LOCAL:
        asked = metric if method == "gradients" else None
        told = interpret.attribute(model, ids, asked, method=method, queries=-1)  # type: ignore[arg-type]
        scores[method] = torch.stack([s[0, :, :-1].sum(0).abs() for s in told.heads.values()])
    scores["position"] = torch.arange(n - 1.0).expand_as(effect)
    return {name: spearman(score, effect) for name, score in scores.items()}


def differences(found: Any, seed: int) -> dict[str, dict[str, float]]:
    """How much better than weights the other methods are, text by text."""
    each = {
        name: torch.stack([spearman(t.scores[name], size_of_effect(t)) for t in found.texts])
        for name in found.texts[0].scores
    }
    return {
        name: over_texts((rho - each["weights"])[None], seed)[0]._asdict()
        for name, rho in each.items()
        if name != "weights"
    }


def shown(found: Any) -> dict[str, Any]:
    """The text whose tokens differ most in effect, and what methods say of it."""
    text = max(found.texts, key=lambda one: float(one.effect.abs().max()))
    rows = {"effect": text.effect.abs(), **text.scores}
    return {
        "words": list(text.words[:-1]),
        "rows": {name: (row / row.max().clamp_min(1e-12)).tolist() for name, row in rows.items()},
    }


def _row(numbers: dict[str, Any], softmax: str, name: str) -> dict[str, Any]:
    """The row of a method, or of a control by a word of its name."""
    rows = numbers["whole"][softmax]
    return next(
        row
        for row in rows
        if row["name"] == name or (row["control"] and name in row["name"].split())
    )


def _checks(numbers: dict[str, Any]) -> tuple[Check, ...]:
    def weights(softmax: str) -> dict[str, Any]:
        return _row(numbers, softmax, "weights")

    def told(row: dict[str, Any], value: str = "correlation") -> str:
        return str(Interval(row[value], row["low"], row["high"]))

    both = ("before", "after")
    rollout, gradients = (
        {s: numbers["differences"][s][name] for s in both} for name in ("rollout", "gradients")
    )
    layers = numbers["layers"]
    margins = [
        g["value"] - w["value"] for g, w in zip(layers["gradients"], layers["weights"], strict=True)
    ]
    return (
        Check(
            "weights rank tokens better than chance",
            "; ".join(f"{s} softmax {told(weights(s))}" for s in both),
            all(weights(s)["low"] > 0 for s in both),
        ),
        Check(
            f"but far from exactly (below {EXACT})",
            " and ".join(f"{weights(s)['correlation']:.2f}" for s in both),
            all(weights(s)["high"] < EXACT for s in both),
        ),
        Check(
            "rollout is worse than weights",
            "; ".join(told(rollout[s], "value") for s in both),
            all(rollout[s]["high"] < 0 for s in both),
        ),
        Check(
            "a weight times its derivative is better, where a value is removed (after softmax)",
            f"by {told(gradients['after'], 'value')}; before softmax by "
            f"{told(gradients['before'], 'value')}",
            gradients["after"]["low"] > 0,
        ),
        Check(
            "and so it is in every layer",
            f"by {min(margins):.2f} at least",
            min(margins) > 0,
        ),
    )


def _answer(numbers: dict[str, Any]) -> str:
    def rho(name: str, softmax: str = "before") -> float:
        return float(_row(numbers, softmax, name)["correlation"])

    layers = numbers["layers"]
    spans = {
        name: (min(v["value"] for v in layers[name]), max(v["value"] for v in layers[name]))
        for name in LOCAL
    }
    return (
        f"The rank correlation of weights with what cutting a token's edges does is "
        f"{rho('weights'):.2f} before softmax and {rho('weights', 'after'):.2f} after; that of "
        f"position alone {rho('position'):.2f} and {rho('position', 'after'):.2f}, of value norms "
        f"{rho('norms'):.2f} and {rho('norms', 'after'):.2f}, of rollout {rho('rollout'):.2f} and "
        f"{rho('rollout', 'after'):.2f}, of gradient × attention {rho('gradients'):.2f} and "
        f"{rho('gradients', 'after'):.2f}. Within one layer weights reach "
        f"{spans['weights'][0]:.2f} to {spans['weights'][1]:.2f}, norms {spans['norms'][0]:.2f} to "
        f"{spans['norms'][1]:.2f} and gradients {spans['gradients'][0]:.2f} to "
        f"{spans['gradients'][1]:.2f}. {numbers['verdicts']['before']}"
    )


def _panels(numbers: dict[str, Any]) -> tuple[Any, ...]:
    groups = [row["name"] for row in numbers["whole"]["after"] if not row["control"]]
    groups += ["position", "shuffled"]
    series = {
        f"cut {softmax} softmax": [
            float(_row(numbers, softmax, group)["correlation"]) for group in groups
        ]
        for softmax in ("before", "after")
    }
    at = list(range(len(numbers["layers"]["weights"])))
    lines = [
        Line(
            name, [float(i) for i in at], [numbers["layers"][name][i]["value"] for i in at],
            dashed=name == "position",
        )
        for name in (*LOCAL, "position")
    ]  # fmt: skip
    kept = numbers["shown"]
    return (
        Bars(
            "Over the whole model",
            "Rank correlation of each score with what cutting a token's edges does, the mean over "
            "texts. Position and shuffled weights are controls.",
            "rank correlation", groups, series,
        ),
        Lines(
            "In each layer alone",
            "The same for edges of the last place, cut in one layer: its own weights, norms and "
            "gradients.",
            "layer", "rank correlation", lines,
        ),
        HeatMap(
            "One text",
            "What cutting did, and what each method says of it, each row as a share of its "
            "largest. Where rows differ from the first, the method points elsewhere.",
            list(kept["rows"].values()), list(kept["rows"]), kept["words"], "share of the largest",
        ),
    )  # fmt: skip
