"""What the tour found: the textbook's numbers, checked, told and drawn."""

from __future__ import annotations

import math
from typing import Any

from regard.lab.apparatus.experiments import Check
from regard.lab.apparatus.panels import Bars, HeatMap, Line, Lines, Panel, Point, Points


def checks(numbers: dict[str, Any]) -> tuple[Check, ...]:
    """Each of the textbook's numbers."""
    weights = numbers["paris"]["weights"]
    scored = numbers["static"]["logits"][1]
    moved, shapes = numbers["senses"], numbers["heads"]
    rows = numbers["causal"]["weights"]
    few, some, many = (row["pairs"] for row in numbers["cost"])
    entropy = {name: shares[-1] for name, shares in numbers["scaling"]["entropy"].items()}
    animal, goku = numbers["links"]
    triangle = all(
        math.isclose(w, 1 / (i + 1) if j <= i else 0.0, rel_tol=1e-6)
        for i, row in enumerate(rows)
        for j, w in enumerate(row)
    )
    return (
        Check(
            "“Paris” gives 0.27, 0.27 and 0.45 to I, love and Paris",
            ", ".join(f"{w:.2f}" for w in weights),
            [round(w, 2) for w in weights] == [0.27, 0.27, 0.45],
        ),
        Check(
            "“apple” scores 4, 8 and 8 with buy, itself and phone",
            ", ".join(f"{s:g}" for s in scored),
            scored == [4.0, 8.0, 8.0],
        ),
        Check(
            "a word of two senses moves to that of its neighbour",
            "; ".join(
                f"{word} beside {context}: [{at[0]:.2f}, {at[1]:.2f}]"
                for word, contexts in moved.items()
                for context, at in contexts.items()
            ),
            all(
                (at[1] > at[0]) == (context in ("phone", "money"))
                for contexts in moved.values()
                for context, at in contexts.items()
            ),
        ),
        Check(
            "512 numbers in 8 heads are 64 for each",
            f"queries {shapes['queries']}, {shapes['parameters']:,} parameters",
            shapes["queries"] == [1, 8, 10, 64],
        ),
        Check(
            "under a causal mask word i of six like ones gives 1/i to each word up to it",
            "rows of 1, 1/2, 1/3, …" if triangle else "another triangle",
            triangle,
        ),
        Check(
            "8 times as long is 64 times the work",
            f"{few:.2g}, {some:.2g} and {many:.2g} FLOPs at 128, 1,024 and 8,192 tokens",
            some == 64 * few and many == 64 * some,
        ),
        Check(
            "undivided, softmax saturates; divided by d it is flat; by √d neither",
            "; ".join(f"{name} {100 * share:.0f}% of the most" for name, share in entropy.items()),
            entropy["undivided"] < 0.2 and 0.7 < entropy["by √d"] < 0.95 < entropy["by d"],
        ),
        Check(
            "a head looks from “it” at “animal”",
            f"layer {animal['layer']} head {animal['head']}: {100 * animal['share']:.0f}%, "
            f"{100 * animal['usual']:.0f}% at that distance in general",
            animal["share"] > 2 * animal["usual"],
        ),
        Check(
            "a head gives “Goku” more than an even share of “he”",
            f"layer {goku['layer']} head {goku['head']}: {100 * goku['share']:.0f}%, "
            f"{100 * goku['usual']:.0f}% at that distance in general",
            goku["share"] > goku["uniform"],
        ),
    )


def answer(numbers: dict[str, Any]) -> str:
    """One paragraph."""
    _, longer, longest = numbers["cost"]
    shares = [row["pairs"] / (row["pairs"] + row["projections"]) for row in (longer, longest)]
    scaling = numbers["scaling"]
    widths, deviation = scaling["widths"], scaling["deviation"]
    animal, goku = (row["share"] / row["usual"] for row in numbers["links"])
    return (
        f"Pairs are {100 * shares[0]:.0f}% of the work of a layer of 512 at 1,024 tokens and "
        f"{100 * shares[1]:.0f}% at 8,192, where the weights of its 8 heads, kept, would take "
        f"{longest['bytes of weights'] / 2**30:.0f} GiB. q·k of random vectors deviates by "
        f"{deviation[0]:.0f} at width {widths[0]} and by {deviation[-1]:.0f} at {widths[-1]}: √d "
        f"each time. From “it” to “animal” a trained head gives {animal:.1f} times what it gives "
        f"at that distance in general; from “he” to “Goku” the best gives {goku:.1f} times that"
        + (": it looks that far back anyway." if goku < 1.5 else ".")
    )


def panels(numbers: dict[str, Any]) -> tuple[Panel, ...]:
    """A picture for each example that has one."""
    said, static = numbers["paris"], numbers["static"]
    six = [str(i + 1) for i in range(6)]
    open_pairs = [
        [w if j <= i else math.nan for j, w in enumerate(row)]
        for i, row in enumerate(numbers["causal"]["weights"])
    ]
    costs, scaling = numbers["cost"], numbers["scaling"]
    lengths = [row["length"] for row in costs]
    return (
        Bars(
            "“I love Paris”",
            "The query of “Paris” with three keys: scores 1, 1, 2, halved, and their softmax.",
            "weight", said["words"], {"weight": said["weights"]}, percent=True,
        ),
        HeatMap(
            "“buy apple phone”, by their own vectors",
            "Scores are symmetric: nothing tells what a word seeks from what it offers.",
            static["logits"], static["words"], static["words"], "score",
        ),
        Points(
            "A word moves to its neighbour's sense",
            "Both begin at [2, 2]; what stands beside them decides where they go.",
            "one sense", "the other",
            [
                Point(f"{word}, {context}", at, word, (2.0, 2.0))
                for word, contexts in numbers["senses"].items()
                for context, at in contexts.items()
            ],
        ),
        HeatMap(
            "A causal mask over six like words",
            "Each word spreads its weight over itself and the words before it.",
            open_pairs, six, six, "weight", y="query", x="key",
        ),
        Lines(
            "FLOPs of a layer of 512",
            "Pairs grow with the square of the length, projections with the length.",
            "tokens", "FLOPs",
            [
                Line("pairs", lengths, [row["pairs"] for row in costs]),
                Line("projections", lengths, [row["projections"] for row in costs]),
            ],
            log_x=True, log_y=True,
        ),
        Lines(
            "Why √d",
            "Missing scaling saturates, over-scaling flattens; √d keeps softmax as it is.",
            "width d", "entropy, of the most",
            [Line(name, scaling["widths"], y) for name, y in scaling["entropy"].items()],
            log_x=True, percent=True,
        ),
    )  # fmt: skip
