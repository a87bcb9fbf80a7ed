"""Whether miscounts are seen in maps before they are seen in pictures: the claim is in ABOUT, and
run() tests it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.interpret.word_maps.components import labelled
from regard.lab.apparatus.experiments import About, Check, Progress, Result, Tell, seeded
from regard.lab.apparatus.panels import Bars, HeatMap, Line, Lines, Panel
from regard.lab.models.painter import (
    NUMBERS,
    PATCH,
    ROLES,
    SHAPES,
    SIDE,
    STROKES,
    WORDS,
    Painted,
    Painter,
    draw,
    paint,
    train,
)

ABOUT = About(
    name="counting",
    title="Miscounts in the maps of words, before they are in the picture",
    claim=(
        "A model that paints “four red crosses” often paints three or five. Where it will go wrong "
        "is told by the map of the noun, the attention of each part of the picture to “crosses”, "
        "while the picture itself is still noise."
    ),
    method=(
        "Pictures of 24 × 24 pixels hold one to six things of one colour and one shape, apart from "
        "each other. A transformer learns to paint them from noise by flow matching: tokens of 3 × "
        "3 pixels attend to each other and to the four words of the prompt (number, colour, shape, "
        "and a full stop), which keep vectors of their own, so that each word stands for itself.",
        "It then paints pictures of new noise in 20 steps, while regard.interpret.grounding "
        "gathers the maps of all words without changing a stroke. Things in the finished picture "
        "are connected regions of colour; things in a map are regions above a threshold. "
        "Which layers are averaged and where the threshold lies is chosen at the middle step, on "
        "one half of the pictures, for each word by itself; all that is reported is of the other "
        "half.",
        "The number asked for must not give the answer. So maps are compared only among pictures "
        "that were asked for the same number: the correlation of what is counted in the map with "
        "what is counted in the end is taken within each number, and a miscount counts as foreseen "
        "if the map shows just as many things as will be painted, and so another number than was "
        "asked for. How often that comes by chance, another picture's map tells.",
        "Compared with: the map of another picture with the same number asked for, the maps of the "
        "other words, what can be counted in the noisy picture of that step, and what is counted "
        "in the model's own guess of the finished picture. Nothing but training makes a noun's map "
        "lie on its things, so nouns are also looked at one by one. The colour says what things "
        "look like, as the noun does, and training may use either: the noun is held against the "
        "words that do not, the number and the full stop, and the colour's figures are reported.",
    ),
    change=(
        "Let words pass through a regard.nn.EncoderBlock before they are looked at: which word's "
        "map shows the things, once every word knows of the others?",
        "Train longer (--full): do miscounts become fewer, and are those that are left still "
        "foreseen?",
        "Add a bias to the noun's column where a thing is wanted or not: does the count follow?",
    ),
    full={"steps": 4000, "pictures": 1024},
)

THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7)


def run(
    *,
    seed: int = 0,
    width: int = 48,
    layers: int = 3,
    heads: int = 2,
    steps: int = 1500,
    batch: int = 32,
    pictures: int = 512,
    progress: Tell | None = None,
) -> Result:
    """Train a painter, let it paint, and look for what it paints in its maps.

    >>> result = run(width=8, layers=1, steps=1, pictures=24)
    >>> sorted(result.numbers["correlation"])
    ['another picture', 'colour', 'guess', 'noisy picture', 'noun', 'number', 'stop']
    """
    step = Progress(steps + STROKES, progress)
    with seeded(seed):
        model = Painter(width, layers, heads)
        losses = train(model, steps, batch, partial(step, "training"))
    with seeded(seed + 1):
        words, _ = draw(pictures)
        found = paint(model, words, partial(step, "painting"))
        numbers = measured(found)
    numbers["loss"] = losses[-1]
    settings = {
        "seed": seed, "width": width, "layers": layers, "heads": heads, "steps": steps,
        "batch": batch, "pictures": pictures,
    }  # fmt: skip
    panels = _panels(numbers, found)
    return Result(ABOUT, settings, _checks(numbers), _answer(numbers), numbers, panels)


def regions(inside: Bool[Tensor, "b height width"], smallest: int = 1) -> Int[Tensor, "b"]:
    """How many connected regions each grid has.

    >>> regions(torch.eye(3, dtype=torch.bool)[None])
    tensor([1])
    """
    labels = labelled(inside[:, None]).flatten(1)
    cells = torch.zeros(len(labels), labels.shape[1] + 1, dtype=torch.int64)
    cells.scatter_add_(1, labels, torch.ones_like(labels))
    return (cells[:, 1:] >= smallest).sum(1)


def in_picture(x: Float[Tensor, "b tokens pixels"]) -> Int[Tensor, "b"]:
    """Things in pictures: regions of three or more pixels that have a colour."""
    pixels = x.unflatten(1, (SIDE, SIDE)).unflatten(-1, (3, PATCH, PATCH)).abs().amax(3)
    return regions(pixels.transpose(2, 3).flatten(3).flatten(1, 2) > 0.5, smallest=3)


def in_map(maps: Float[Tensor, "b tokens"], threshold: float) -> Int[Tensor, "b"]:
    """Things in maps: regions above a threshold between the lowest cell and the highest."""
    low, high = maps.amin(1, keepdim=True), maps.amax(1, keepdim=True)
    scaled = (maps - low) / (high - low).clamp(min=1e-9)
    return regions(scaled.unflatten(1, (SIDE, SIDE)) >= threshold)


def within(found: Int[Tensor, "b"], final: Int[Tensor, "b"], asked: Int[Tensor, "b"]) -> float:
    """The correlation of two counts among pictures that were asked for the same number."""
    a, b = (count.double().clone() for count in (found, final))
    for number in asked.unique():
        same = asked == number
        a[same] -= a[same].mean()
        b[same] -= b[same].mean()
    both = a.norm() * b.norm()
    return float((a * b).sum() / both) if both > 0 else 0.0


def foreseen(found: Int[Tensor, "b"], final: Int[Tensor, "b"], asked: Int[Tensor, "b"]) -> float:
    """The share of miscounts of which a count has the number that is painted in the end."""
    wrong = final != asked
    return float((found == final)[wrong].float().mean()) if wrong.any() else math.nan


def measured(found: Painted) -> dict[str, Any]:
    """What can be counted at each step, against what is there in the end."""
    asked, final = found.words[:, 0] + 1, in_picture(found.finished)
    half = len(asked) // 2
    test = slice(half, None)
    counts: dict[str, list[Tensor]] = {}
    chosen: dict[str, Any] = {}
    for place, role in enumerate(ROLES):
        maps = found.maps[place]
        layers, threshold = chosen[role] = _choice(maps[:half], final[:half])
        counts[role] = [
            in_map(maps[test, step][:, layers].mean(1), threshold) for step in range(STROKES)
        ]
    counts["noisy picture"] = [in_picture(x[test]) for x in found.noisy]
    counts["guess"] = [in_picture(x[test]) for x in found.guesses]
    other = _another(asked[test])
    counts["another picture"] = [count[other] for count in counts["noun"]]
    asked, last = asked[test], final[test]
    tokens = found.finished[test].abs().amax(-1) > 0.5
    noun = found.maps[ROLES.index("noun")][test][:, :, chosen["noun"][0]].mean(2)
    middle, shape = STROKES // 2, found.words[test, ROLES.index("noun")]
    of = {name: shape == WORDS.index(name) for name in SHAPES}
    return {
        "right": float((last == asked).float().mean()),
        "right_by_number": [float((last == asked)[asked == n].float().mean()) for n in range(1, 7)],
        "miscounts": int((last != asked).sum()),
        "tested": len(asked),
        "correlation": {
            name: [within(count, last, asked) for count in each] for name, each in counts.items()
        },
        "foreseen": {
            name: [foreseen(count, last, asked) for count in each] for name, each in counts.items()
        },
        "agrees": {
            name: [float((count == last).float().mean()) for count in each]
            for name, each in counts.items()
        },
        "on_things": [higher_on(noun[:, step], tokens) for step in range(STROKES)],
        "by_noun": {
            name: {
                "on_things": higher_on(noun[these, middle], tokens[these]),
                "foreseen": foreseen(counts["noun"][middle][these], last[these], asked[these]),
            }
            for name, these in of.items()
        },
        "chosen": {role: {"layers": how[0], "threshold": how[1]} for role, how in chosen.items()},
    }


def _choice(
    maps: Float[Tensor, "b steps layers tokens"], final: Int[Tensor, "b"]
) -> tuple[list[int], float]:
    """The layers and the threshold whose counts are most often those of the pictures, half way."""
    half, many = maps[:, STROKES // 2], maps.shape[2]
    options = [list(range(many)), *([layer] for layer in range(many) if many > 1)]
    tried = {
        (place, threshold): float(
            (in_map(half[:, layers].mean(1), threshold) == final).float().mean()
        )
        for place, layers in enumerate(options)
        for threshold in THRESHOLDS
    }
    place, threshold = max(tried, key=lambda option: tried[option])
    return options[place], threshold


def _another(asked: Int[Tensor, "b"]) -> Int[Tensor, "b"]:
    """For each picture the next one that was asked for the same number."""
    other = torch.arange(len(asked))
    for number in asked.unique():
        same = (asked == number).nonzero().flatten()
        other[same] = same.roll(1)
    return other


def higher_on(maps: Float[Tensor, "b tokens"], there: Bool[Tensor, "b tokens"]) -> float:
    """How often a cell with a thing is higher than one without, in its picture; 50% by chance."""
    shares = []
    for map, on in zip(maps, there, strict=True):
        if on.any() and not on.all():
            above = map[on][:, None] - map[~on]
            shares.append((0.5 + 0.5 * above.sign()).mean())
    return float(torch.stack(shares).mean()) if shares else math.nan


def _checks(numbers: Mapping[str, Any]) -> tuple[Check, ...]:
    middle = STROKES // 2
    correlation = {name: each[middle] for name, each in numbers["correlation"].items()}
    seen = {name: each[middle] for name, each in numbers["foreseen"].items()}
    on = numbers["on_things"][middle]
    words = max(seen[role] for role in ("number", "stop"))
    return (
        Check("half way the noun's map is higher where things will be", f"{on:.0%}", on > 0.6),
        Check(
            "half way it foresees miscounts",
            f"{seen['noun']:.0%} of them, {seen['another picture']:.0%} with another's map",
            seen["noun"] > seen["another picture"] + 0.1,
        ),
        Check(
            "the noisy picture of that step does not",
            f"correlation {correlation['noisy picture']:.2f}, the map's {correlation['noun']:.2f}",
            correlation["noun"] > correlation["noisy picture"] + 0.1,
        ),
        Check(
            "the noun's map does better than those of the number and of the full stop",
            f"{seen['noun']:.0%} of miscounts, the better of theirs {words:.0%}, the colour's "
            f"{seen['colour']:.0%}",
            seen["noun"] > words + 0.05,
        ),
    )


def _answer(numbers: Mapping[str, Any]) -> str:
    middle = STROKES // 2
    seen, correlation = numbers["foreseen"], numbers["correlation"]
    nouns = "; ".join(
        f"the map of {noun} is higher on things in {each['on_things']:.0%} of comparisons and "
        f"foresees {each['foreseen']:.0%} of miscounts"
        for noun, each in numbers["by_noun"].items()
    )
    return (
        f"{numbers['right']:.0%} of {numbers['tested']} pictures have the number of things that "
        f"was asked for. Of the {numbers['miscounts']} others the noun's map foresees "
        f"{seen['noun'][0]:.0%} at the first step, {seen['noun'][middle // 2]:.0%} after a quarter "
        f"and {seen['noun'][middle]:.0%} half way; the map of another picture with the same number "
        f"asked for {seen['another picture'][middle]:.0%}. Among pictures of one number asked "
        f"for, counts in map and picture then correlate by {correlation['noun'][middle]:.2f}, "
        f"those of the number's map by {correlation['number'][middle]:.2f}, of the colour's by "
        f"{correlation['colour'][middle]:.2f}, of the full stop's by "
        f"{correlation['stop'][middle]:.2f}, those in the noisy picture by "
        f"{correlation['noisy picture'][middle]:.2f}, and those in the model's own guess by "
        f"{correlation['guess'][middle]:.2f}. Nouns differ: {nouns}."
    )


def _panels(numbers: Mapping[str, Any], found: Painted) -> tuple[Panel, ...]:
    at = [float(step) for step in range(STROKES)]
    shown = ("noun", "number", "colour", "stop", "noisy picture", "guess", "another picture")
    lines = {
        name: [
            Line(each, at, numbers[name][each], dashed=each in ("guess", "another picture"))
            for each in shown
        ]
        for name in ("correlation", "foreseen")
    }
    final, asked = in_picture(found.finished), found.words[:, 0] + 1
    wrong = ((final != asked) & (asked >= 3)).nonzero().flatten()
    example = int(wrong[-1]) if len(wrong) else len(asked) - 1
    layers = numbers["chosen"]["noun"]["layers"]
    map = found.maps[ROLES.index("noun")][example, STROKES // 2, layers].mean(0)
    ink = found.finished[example].abs().mean(-1)
    prompt = " ".join(WORDS[word] for word in found.words[example, :3].tolist())
    cells = [str(n) for n in range(SIDE)]
    return (
        Lines("Counts and the finished picture", "Among pictures of one number asked for: the "
              "correlation of what is counted at a step with what is there in the end.",
              "step", "correlation", lines["correlation"]),
        Lines("Miscounts foreseen", "The share of miscounts of which a count has the number that "
              "will be painted.", "step", "foreseen", lines["foreseen"], percent=True),
        Bars("Pictures with the right number", "By the number asked for.", "right", NUMBERS,
             {"painted": numbers["right_by_number"]}, percent=True),
        HeatMap(f"“{prompt}”: the noun, half way", "The map of the noun when half of the steps are "
             "done.", map.reshape(SIDE, SIDE).tolist(), cells, cells, "share"),
        HeatMap(f"The picture: {int(final[example])} painted", "The ink of each token in the end.",
             ink.reshape(SIDE, SIDE).tolist(), cells, cells, "ink"),
    )  # fmt: skip
