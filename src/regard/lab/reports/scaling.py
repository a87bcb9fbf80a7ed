"""What scaling did to softmax and to training: checked, told and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard.lab.apparatus.experiments import Check
from regard.lab.apparatus.panels import Line, Lines, smoothed
from regard.monitoring import LogitExplosion

SCALES = ("undivided", "by √d", "by d")


def of_softmax(numbers: dict[str, Any]) -> tuple[Check, ...]:
    slope, d, last = numbers["variance_slope"], numbers["widths"][-1], numbers["fresh"][-1]
    raw, root, whole = (last[name] for name in SCALES)
    # What narrow vectors give depends on the few numbers that were drawn.
    wide = [m for m in numbers["fresh"] if m["variance"] > 10] or numbers["fresh"]
    kept = [m["by √d"]["entropy"] for m in wide]
    return (
        Check("the variance of q·k grows as d", f"as d to the {slope:.2f}", abs(slope - 1) < 0.05),
        Check(
            "undivided, softmax saturates",
            f"entropy {raw['entropy']:.0%} of the most at d = {d}",
            raw["entropy"] < 0.25,
        ),
        Check(
            "and its gradient vanishes",
            f"that of the median query is {raw['gradient'] / root['gradient']:.2g} of what it is "
            "divided by √d",
            raw["gradient"] < 0.5 * root["gradient"],
        ),
        Check(
            "divided by √d, entropy does not depend on d",
            f"{min(kept):.0%} to {max(kept):.0%}",
            max(kept) - min(kept) < 0.06,
        ),
        Check(
            "divided by d, softmax is nearly uniform and passes little on",
            f"entropy {whole['entropy']:.1%}, gradient {whole['gradient'] / root['gradient']:.2g} "
            "of that divided by √d",
            whole["entropy"] > 0.99 and whole["gradient"] < 0.2 * root["gradient"],
        ),
    )


def of_training(ends: dict[str, list[dict[str, Any]]], steps: int) -> tuple[Check, ...]:
    learned = {
        name: [steps if one["learned_at"] is None else one["learned_at"] for one in runs]
        for name, runs in ends.items()
    }
    raw, root, whole = learned.values()
    warned = {name: [one["warned_at"] is not None for one in runs] for name, runs in ends.items()}
    told = [name for name, did in warned.items() if any(did)]
    return (
        Check(
            "undivided, training suffers",
            reached(ends["undivided"], steps),
            all(late > 3 * soon for late, soon in zip(raw, root, strict=True)),
        ),
        Check(
            "divided by √d it learns soonest",
            f"{reached(ends['by √d'], steps)}; divided by d {reached(ends['by d'], steps)}",
            max(root) < steps and all(soon < late for soon, late in zip(root, whole, strict=True)),
        ),
        Check(
            "a monitor would have told",
            "it warned: " + (", ".join(told) or "never"),
            all(warned["undivided"]) and told == ["undivided"],
        ),
    )


def reached(runs: Sequence[dict[str, Any]], steps: int) -> str:
    """How far runs of several seeds came, as a range."""
    learned = [one["learned_at"] for one in runs]
    if None not in learned:
        return f"90% right after {_range(learned)} steps"
    return f"{_range([round(100 * one['accuracy']) for one in runs])}% right after {steps} steps"


def _range(values: Sequence[int]) -> str:
    """
    >>> _range([55, 52, 60]), _range([7, 7])
    ('52 to 60', '7')
    """
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def answer(numbers: dict[str, Any], width: int) -> str:
    d, last, trained = numbers["widths"][-1], numbers["fresh"][-1], numbers["trained"]
    entropy = {name: last[name]["entropy"] for name in SCALES}
    said = (
        f"The variance of q·k grows as d to the {numbers['variance_slope']:.2f} "
        f"({last['variance']:.0f} at d = {d}). At that width softmax over 64 keys has "
        f"{entropy['undivided']:.0%} of the largest entropy undivided, {entropy['by √d']:.0%} "
        f"divided by √d and {entropy['by d']:.1%} divided by d; undivided, "
        f"{last['undivided']['saturated']:.0%} of queries put more than 99% of their weight on one "
        "key."
    )
    said += f" {of_gradients(numbers)}"
    steps, ends = len(trained["undivided"]["accuracy"]), numbers["ends"]
    if not steps:
        return said
    runs = ", ".join(
        f"{name if name == 'undivided' else f'divided {name}'} {reached(found, steps)}"
        for name, found in ends.items()
    )
    warned = [one["warned_at"] for one in ends["undivided"] if one["warned_at"] is not None]
    monitor = (
        f"A monitor warned of the undivided one at step {_range(warned)}, in {len(warned)} of "
        f"{len(ends['undivided'])} runs"
        if warned
        else "A monitor warned of none of it"
    )
    return (
        f"{said} Trained to look things up at width {width}, over {len(ends['undivided'])} seeds: "
        f"{runs}. {monitor}."
    )


def of_gradients(numbers: dict[str, Any]) -> str:
    """Why gradients of undivided scores are the larger ones where heads are narrow."""
    widths, fresh = numbers["widths"], numbers["fresh"]
    times = [m["undivided"]["gradient"] / m["by √d"]["gradient"] for m in fresh]
    at = times.index(max(times))
    d = widths[at]
    return (
        f"Undivided gradients are larger at first, {times[at]:.2g} times at d = {d}: the chain "
        f"rule multiplies by what scores are multiplied by, which is √d = {d**0.5:.2g} times as "
        f"much undivided. Without that factor they are {times[at] / d**0.5:.2g} times as large "
        f"there, and {times[-1] / widths[-1] ** 0.5:.1g} at d = {widths[-1]}."
    )


def panels(numbers: dict[str, Any]) -> tuple[Lines, ...]:
    widths, fresh, names = numbers["widths"], numbers["fresh"], list(SCALES)

    def against_width(what: str) -> list[Line]:
        return [Line(name, widths, [m[name][what] for m in fresh]) for name in names]

    softmax = (
        Lines(
            "Variance of q·k",
            "Undivided it is d, the dashed line. Divided by √d it is 1 at every width, and divided "
            "by d it is 1/d.",
            "width d", "variance",
            [*against_width("variance"), Line("d", widths, list(widths), dashed=True)],
            log_x=True, log_y=True,
        ),
        Lines(
            "Entropy of softmax over 64 keys",
            "100 % looks at all keys alike, 0 % at one. Only division by √d does not depend on d.",
            "width d", "share of the most", against_width("entropy"), log_x=True, percent=True,
        ),
        Lines(
            "Gradient that reaches the median query",
            "Undivided it breaks down as softmax saturates; divided by d it fades as 1/√d. In "
            "narrow heads the undivided one is larger, since it is multiplied by 1 instead of 1/√d "
            "on its way.",
            "width d", "norm of ∂(out·r)/∂q", against_width("gradient"), log_x=True, log_y=True,
        ),
        Lines(
            "What softmax itself passes on",
            "The norm of ∂p/∂s of the median query, without the factor that scores were multiplied "
            "by.",
            "width d", "norm of ∂p/∂s", against_width("jacobian"), log_x=True, log_y=True,
        ),
    )  # fmt: skip
    trained = numbers["trained"]
    if not trained[names[0]]["loss"]:
        return softmax
    return (
        *softmax,
        Lines(
            "Training: loss", "The first seed. The same model and data; only the scale differs.",
            "step", "loss, nats",
            [Line(name, *smoothed(run["loss"])) for name, run in trained.items()],
        ),
        Lines(
            "Training: answers that are right", "The first seed. Chance is 1 in 16.",
            "step", "accuracy",
            [Line(name, *smoothed(run["accuracy"])) for name, run in trained.items()],
            percent=True,
        ),
        Lines(
            "Largest logit, as a monitor sees it",
            "Above the dashed line regard.Monitor warns of a logit explosion.",
            "step", "largest logit",
            [*(Line(n, r["looked_at"], r["max_logit"]) for n, r in trained.items()),
             Line("warns", [0, len(trained[names[0]]["loss"])], [LogitExplosion().above] * 2,
                  dashed=True)],
            log_y=True,
        ),
    )  # fmt: skip
