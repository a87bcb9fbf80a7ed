"""What the experiment of heads found: whether its claims hold, in words, and drawn."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from regard.lab.apparatus.experiments import Check
from regard.lab.apparatus.panel_ranges import panels_over_seeds
from regard.lab.apparatus.panels import Bars, HeatMap, Line, Lines, Panel

DOES = 0.3
"""The share of its weight from which a head is said to do a thing."""
KINDS = ("previous", "induction")


def strongest(found: dict[str, Any], what: str, layer: int) -> tuple[int, float]:
    """The head of a layer that does a thing most, and how much."""
    table = found[what][layer]
    best = max(range(len(table)), key=table.__getitem__)
    return best, table[best]


def called(heads: int) -> str:
    return "1 head" if heads == 1 else f"{heads} heads"


def checks(numbers: dict[str, Any], several: str) -> tuple[Check, ...]:
    runs = numbers["seeds"]
    first, one, many = (
        [run["trained"][name][at] for run in runs]
        for name, at in ((several, 0), ("1 head", -1), (several, -1))
    )

    def best(found: list[dict[str, Any]], what: str, layer: int) -> list[float]:
        return [strongest(each, what, layer)[1] for each in found]

    previous, induction = best(many, "previous", 0), best(many, "induction", -1)
    whole = [each["again_accuracy"] for each in many]
    left = {
        (what, by): [run["silenced"]["kinds"][what][by]["foreseen"] for run in runs]
        for what in KINDS
        for by in ("zero", "mean")
    }
    others = [
        share
        for run in runs
        for what in KINDS
        for by in ("zero", "mean")
        for share in run["silenced"]["kinds"][what][by]["others"]
    ]
    gains = [o["text_loss"] - m["text_loss"] for o, m in zip(one, many, strict=True)]
    return (
        Check(
            "a head of the first layer comes to look at the token before",
            f"{_range(best(first, 'previous', 0))} of its weight at first, {_range(previous)} then",
            min(previous) > 0.5,
        ),
        Check(
            "a head of the last layer comes to look at what followed last time",
            f"{_range(best(first, 'induction', -1))} of its weight at first, "
            f"{_range(induction)} then",
            min(induction) > 0.5,
        ),
        Check(
            "with them, what is said again is foreseen",
            f"{_range([m['again_accuracy'] for m in first])} of it at first, {_range(whole)} then",
            min(whole) > 0.8,
        ),
        Check(
            "without the heads of either kind it is not",
            "; ".join(
                f"without the {what} kind {_range(left[what, 'zero'])}, at their mean "
                f"{_range(left[what, 'mean'])}"
                for what in KINDS
            ),
            max(max(shares) for shares in left.values()) < min(whole) / 2,
        ),
        Check(
            "without as many others of the same layer, or all others, it is",
            f"{_range(others)} of it, {sum(others) / len(others):.0%} in the mean of the draws"
            if others
            else "there are no others",
            bool(others) and sum(others) / len(others) > 0.75 * min(whole),
        ),
        Check(
            f"{several} predict text better than one at equal parameters",
            f"{_range([m['text_accuracy'] for m in many])} of words against "
            f"{_range([o['text_accuracy'] for o in one])}, with a loss lower by "
            f"{min(gains):.2f} to {max(gains):.2f}",
            min(gains) > 0.02,
        ),
    )


def answer(numbers: dict[str, Any], several: str) -> str:
    runs = numbers["seeds"]
    one, many = ([run["trained"][name][-1] for run in runs] for name in ("1 head", several))
    silent, layers = [run["silenced"] for run in runs], len(many[0]["previous"])
    previous = [strongest(each, "previous", 0)[1] for each in many]
    induction = [strongest(each, "induction", -1)[1] for each in many]
    left = {
        (what, by): _range([each["kinds"][what][by]["foreseen"] for each in silent])
        for what in KINDS
        for by in ("zero", "mean")
    }
    counts = {
        what: _numbers([len(each["kinds"][what]["heads"]) for each in silent]) for what in KINDS
    }
    others = [
        share
        for each in silent
        for what in KINDS
        for by in ("zero", "mean")
        for share in each["kinds"][what][by]["others"]
    ]
    alone = [
        min(m["again_accuracy"] for m in each["alone"] if m["layer"] == layers - 1)
        for each in silent
    ]
    spare = [_spare(each["left"]) for each in silent]
    copies = [each["again_accuracy"] for each in one]
    return (
        f"With {len(runs)} {'seed' if len(runs) == 1 else 'seeds'}, ranges are over them: a head "
        f"of layer 1 came to put {_range(previous)} of its weight on the token before, a head of "
        f"layer {layers} {_range(induction)} on the word that followed last time. Random words "
        f"said a second time were foreseen {_range([m['again_accuracy'] for m in many])} of the "
        f"time. With what looks at the token before silent ({counts['previous']}) it was "
        f"{left['previous', 'zero']}, and {left['previous', 'mean']} if they gave their mean; "
        f"without what looks at what followed ({counts['induction']}) "
        f"{left['induction', 'zero']} and {left['induction', 'mean']}; "
        + (
            f"without as many others of the same layer, or all where they are fewer, "
            f"{_range(others)}, "
            f"{sum(others) / len(others):.0%} in the mean; "
            if others
            else ""
        )
        + f"with any one head of layer {layers} silent never less than {_range(alone)}, as others "
        f"of its kind stand in. Of {len(silent[0]['order'])} heads {_numbers(spare, heads=False)} "
        f"could be silenced before text lost 0.1 nats. At equal parameters "
        f"({numbers['parameters']:,}) {several} predict "
        f"{_range([m['text_accuracy'] for m in many], 1)} of the words of new text and one "
        f"{_range([m['text_accuracy'] for m in one], 1)}. With one head a layer {_range(copies)} "
        f"of what is said again was foreseen: "
        + ("copying does not need several." if min(copies) > 0.8 else "too little to copy.")
    )


def _spare(left: list[dict[str, float]]) -> int:
    """How many heads were silent before text lost 0.1 nats."""
    most = left[0]["text_loss"] + 0.1
    return sum(1 for _ in takewhile(lambda m: m["text_loss"] <= most, left)) - 1


def _range(shares: list[float], digits: int = 0) -> str:
    """The least and the largest of some shares, or the one they are."""
    low, high = (f"{100 * share:.{digits}f}" for share in (min(shares), max(shares)))
    return f"{low}%" if low == high else f"{low} to {high}%"


def _numbers(counts: list[int], *, heads: bool = True) -> str:
    low, high = min(counts), max(counts)
    said = str(low) if low == high else f"{low} to {high}"
    return (f"{said} head" if said == "1" else f"{said} heads") if heads else said


def panels(numbers: dict[str, Any], several: str) -> tuple[Panel, ...]:
    return panels_over_seeds([_panels(run, several) for run in numbers["seeds"]])


def _panels(shown: dict[str, Any], several: str) -> tuple[Panel, ...]:
    trained, silent = shown["trained"], shown["silenced"]
    history, last = trained[several], trained[several][-1]
    steps, layers = [m["step"] for m in history], len(last["previous"])
    p, i = strongest(last, "previous", 0)[0], strongest(last, "induction", -1)[0]
    by_layer = [[m for m in silent["alone"] if m["layer"] == at] for at in range(layers)]
    whole, words = silent["whole"]["again_accuracy"], shown["shown"]["words"]
    columns = [str(h + 1) for h in range(len(by_layer[0]))]
    kinds = silent["kinds"]
    left = {
        by: [kinds[what][name]["foreseen"] for what in KINDS]
        for by, name in (("nothing instead", "zero"), ("their mean instead", "mean"))
    }
    others = [kinds[what]["zero"]["others"] for what in KINDS]
    left["as many others"] = [sum(some) / len(some) if some else 0.0 for some in others]
    return (
        Lines(
            f"Two heads grow ({several})",
            "The second needs the first. Once both are there, what is said again is foreseen.",
            "step", "share",
            [Line("previous", steps, [m["previous"][0][p] for m in history]),
             Line("induction", steps, [m["induction"][-1][i] for m in history]),
             Line("foreseen", steps, [m["again_accuracy"] for m in history], dashed=True)],
            percent=True,
        ),
        Lines(
            "Loss on new text", "The same parameters, cut into one head or several.",
            "step", "loss, nats a word",
            [Line(name, steps[1:], [m["text_loss"] for m in run[1:]])
             for name, run in trained.items()],
        ),
        Bars(
            "What is predicted",
            "Several heads help where there is more than one thing to look for.",
            "accuracy", ["new text", "said again"],
            {name: [run[-1]["text_accuracy"], run[-1]["again_accuracy"]]
             for name, run in trained.items()},
            percent=True,
        ),
        HeatMap(
            f"The induction head (layer {layers}, head {i + 1})",
            "Ten words said twice. The second time each looks at what followed the first time: a "
            "stripe nine places back.",
            shown["shown"]["weights"], words, words, "weight", y="reads", x="looks at",
        ),
        Bars(
            "What is foreseen without a kind of heads",
            "All heads of a kind silent, and as many others of the same layer (mean of the draws).",
            "foreseen", ["previous", "induction"], left, percent=True,
        ),
        HeatMap(
            "What each head's silence costs",
            "Share of what is said again that is no longer foreseen when one head is silent.",
            [[max(0.0, whole - m["again_accuracy"]) for m in row] for row in by_layer],
            [f"layer {at + 1}" for at in range(layers)], columns, "lost", x="head",
        ),
        Lines(
            "One head after another falls silent", "Those first that text misses least.",
            "heads silent", "share predicted",
            [Line("new text", range(len(silent["left"])),
                  [m["text_accuracy"] for m in silent["left"]]),
             Line("said again", range(len(silent["left"])),
                  [m["again_accuracy"] for m in silent["left"]])],
            percent=True,
        ),
    )  # fmt: skip
