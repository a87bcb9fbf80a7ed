"""What forms of attention cost and lose: checked, told and drawn."""

from __future__ import annotations

from typing import Any

from regard.lab.apparatus.experiments import Check
from regard.lab.apparatus.panels import Bars, Line, Lines

FORMS = ("eager", "fused", "window", "blocks", "linear")
PAIRS, ASKED, VALUES = 48, 16, 16
"""Of the recall task: pairs that are shown and asked for, and different values."""
NEAR = 16
"""Keys that the window sees in it."""


def checks(numbers: dict[str, Any]) -> tuple[Check, ...]:
    slope, recall = numbers["slopes"], numbers["recall"]
    window, linear = (numbers["crossings"][f"{form} over fused"] for form in ("window", "linear"))
    eager_last = numbers["measured"]["eager"][-1]
    off = abs(eager_last["bytes"] / eager_last["predicted_bytes"] - 1)
    over = {
        form: [one["seconds"] / one["predicted_seconds"] for one in found]
        for form, found in numbers["measured"].items()
    }
    return (
        Check(
            "eager attention takes memory as n², fused as n",
            f"as n to the {slope['eager']['bytes']:.2f} and {slope['fused']['bytes']:.2f}",
            slope["eager"]["bytes"] > 1.8 and slope["fused"]["bytes"] < 1.2,
        ),
        Check(
            "fused time still grows as n², a window's and linear attention's as n",
            f"as n to the {slope['fused']['seconds']:.2f}, {slope['window']['seconds']:.2f} and "
            f"{slope['linear']['seconds']:.2f}",
            slope["fused"]["seconds"] > 1.6
            and max(slope[form]["seconds"] for form in ("window", "linear")) < 1.4,
        ),
        Check(
            "windows and linear attention are quicker from some length on",
            f"the window from {window} tokens, linear attention from {linear}",
            window is not None and linear is not None,
        ),
        Check("regard.cost foresees memory", f"within {off:.1%} for eager attention", off < 0.1),
        Check(
            "and bounds times from below",
            "at the longest they take "
            + ", ".join(f"{found[-1]:.1f}× ({form})" for form, found in over.items())
            + " of the bound",
            min(min(found) for found in over.values()) > 0.9,
        ),
        Check(
            "cheap forms recall less of what lies far back",
            ", ".join(f"{form} {found['far']:.0%}" for form, found in recall.items()),
            max(recall[form]["far"] for form in ("window", "blocks", "linear"))
            < recall["fused"]["far"] - 0.1,
        ),
    )


def answer(numbers: dict[str, Any]) -> str:
    n, measured = numbers["lengths"][-1], numbers["measured"]
    slope, crossings = numbers["slopes"], numbers["crossings"]

    def each(what: str, unit: float) -> str:
        found = (f"{form} {unit * runs[-1][what]:.3g}" for form, runs in measured.items())
        return ", ".join(found)

    crossed = "; ".join(
        f"{name} from {at} tokens" if at is not None else f"{name} at no length measured"
        for name, at in crossings.items()
    )
    return (
        f"On {numbers['device']['name']}, time grows as n to the "
        + ", ".join(f"{slope[form]['seconds']:.1f} ({form})" for form in FORMS)
        + f", memory as n to the {slope['eager']['bytes']:.1f} eager and "
        f"{slope['fused']['bytes']:.1f} fused. At the longest of each (fused {n} tokens) a call "
        f"takes, in ms: {each('seconds', 1e3)}; regard.cost's bounds are "
        f"{each('predicted_seconds', 1e3)}; and holds, in MB: {each('bytes', 1e-6)}. What is "
        f"quicker: {crossed}. Of values shown more than {NEAR} tokens back are recalled: "
        + ", ".join(f"{form} {found['far']:.0%}" for form, found in numbers["recall"].items())
        + f" (chance is {1 / VALUES:.0%})."
    )


def panels(numbers: dict[str, Any]) -> tuple[Lines | Bars, ...]:
    lengths, measured, recall = (numbers[name] for name in ("lengths", "measured", "recall"))

    def lines(what: str, unit: float) -> list[Line]:
        return [
            Line(form, lengths[: len(runs)], [unit * run[what] for run in runs])
            for form, runs in measured.items()
            if what in runs[0]
        ]

    return (
        Lines(
            "Time of a call, measured", "Two heads, one thread; the least of several rounds.",
            "tokens n", "milliseconds", lines("seconds", 1e3), log_x=True, log_y=True,
        ),
        Lines(
            "Time, at best, as regard.cost predicts", "From what this machine's products and "
            "copies reach. Linear attention is counted by hand.",
            "tokens n", "milliseconds", lines("predicted_seconds", 1e3), log_x=True, log_y=True,
        ),
        Lines(
            "Memory beside the inputs, measured", "Where texts are long, only eager attention "
            "builds n×n. Where they are short, the masks of window and blocks are written out.",
            "tokens n", "megabytes", lines("bytes", 1e-6), log_x=True, log_y=True,
        ),
        Lines(
            "Memory, as regard.cost predicts", "The output and one number a row, but for eager. "
            "Scratch space of the kernels is left out.",
            "tokens n", "megabytes", lines("predicted_bytes", 1e-6), log_x=True, log_y=True,
        ),
        Lines(
            "Times over their bounds", "How far each is from what the machine could do at best.",
            "tokens n", "measured / predicted",
            [Line(form, lengths[: len(runs)], [r["seconds"] / r["predicted_seconds"] for r in runs])
             for form, runs in measured.items()],
            log_x=True, log_y=True,
        ),
        Bars(
            "What is recalled", f"{PAIRS} pairs shown, {ASKED} asked for. "
            f"Near is up to {NEAR} tokens back.", "share of values", ["near", "far"],
            {form: [found["near"], found["far"]] for form, found in recall.items()}, percent=True,
        ),
    )  # fmt: skip
