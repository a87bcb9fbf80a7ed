"""What pictures, sounds, graphs and memories gave: checked, told and drawn."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from regard.lab.apparatus.experiments import Check
from regard.lab.apparatus.panels import Bars, Graph, HeatMap, Line, Lines, Panel, Point
from regard.lab.material.drawn_digits import SIDE
from regard.lab.material.karate_club import MEMBERS, OFFICERS, friendships, places


def checks(numbers: dict[str, Any]) -> tuple[Check, ...]:
    pictures, sounds, graphs = (numbers[name] for name in ("pictures", "sounds", "graphs"))
    memory, told = numbers["memory"], graphs["accuracy"]
    narrow, wide = (memory["recall"][w] for w in (min(memory["recall"]), max(memory["recall"])))
    return (
        Check(
            "patches of a picture: digits are read, and the class token looks at ink",
            f"{pictures['accuracy']:.0%} right; {pictures['on_ink']:.0%} of its attention on the "
            f"{pictures['ink']:.0%} of patches with ink",
            pictures["accuracy"] > 0.8 and pictures["on_ink"] > 1.5 * pictures["ink"],
        ),
        Check(
            "frames of a sound: letters are written, looking where each sounds",
            f"{sounds['accuracy']:.0%} right; {sounds['aligned']:.0%} of the attention where the "
            f"letter sounds, {sounds['chance']:.0%} by chance",
            sounds["accuracy"] > 0.85 and sounds["aligned"] > 3 * sounds["chance"],
        ),
        Check(
            "nodes of a graph: with the mask of friendships two known sides tell most others",
            f"{told['friends']:.0%} right; without the mask {told['everyone']:.0%}",
            told["friends"] > told["everyone"] + 0.2 and graphs["outside"] == 0,
        ),
        Check(
            "slots of a memory: wide keys are found among a thousand, narrow ones are not",
            f"{wide[-1]:.0%} and {narrow[-1]:.0%} of {memory['slots'][-1]}",
            wide[-1] > 0.95 and narrow[-1] < 0.5,
        ),
        Check(
            "and passages are found by questions",
            f"{sum(memory['passages']['right'])} of {len(memory['passages']['right'])}",
            all(memory["passages"]["right"]),
        ),
    )


def answer(numbers: dict[str, Any]) -> str:
    pictures, sounds, graphs = (numbers[name] for name in ("pictures", "sounds", "graphs"))
    memory, passages = numbers["memory"], numbers["memory"]["passages"]
    wide = max(memory["recall"])
    return (
        f"Of drawn digits {pictures['accuracy']:.0%} are read, with {pictures['on_ink']:.0%} of "
        f"the class token's attention on the {pictures['ink']:.0%} of patches that hold ink. Of "
        f"letters played as tones {sounds['accuracy']:.0%} are written, with "
        f"{sounds['aligned']:.0%} of the attention on frames in which the letter sounds. In the "
        f"karate club {graphs['accuracy']['friends']:.0%} of sides follow from the two leaders' "
        f"where friends look at friends, {graphs['accuracy']['everyone']:.0%} where everyone "
        f"looks at everyone. A noisy key {wide} wide finds its value among "
        f"{memory['slots'][-1]} in {memory['recall'][wide][-1]:.0%} of lookups, one "
        f"{min(memory['recall'])} wide in {memory['recall'][min(memory['recall'])][-1]:.0%}. "
        f'"{passages["questions"][0]}" puts {passages["weight"][0]:.0%} on one verse of 600: '
        f'"{passages["found"][0]}"'
    )


def _club(graphs: dict[str, Any]) -> Graph:
    """The karate club as it is drawn: who looks at whom, and on which side each is said to be."""
    weights, at = torch.tensor(graphs["shown"]), places().tolist()
    mean = (weights + weights.T) / 2
    edges = {(a, b): float(mean[a, b]) for a, b in friendships().triu(1).nonzero().tolist()}
    leaders = {0: "leader 1", MEMBERS - 1: "leader 2"}

    def group(member: int) -> str:
        return f"leader {graphs['told'][member] + 1}'s" if graphs["right"][member] else "wrong"

    return Graph(
        "The karate club",
        "Friendships, as wide as the attention along them in the first layer (the mean of both "
        "directions). Colours are the sides that the model says.",
        [Point(leaders.get(m, ""), at[m], group(m)) for m in range(MEMBERS)], edges,
    )  # fmt: skip


def panels(numbers: dict[str, Any]) -> tuple[Panel, ...]:
    pictures, sounds, graphs = (numbers[name] for name in ("pictures", "sounds", "graphs"))
    shown, heard, memory = pictures["shown"], sounds["shown"], numbers["memory"]
    passages = memory["passages"]
    side = len(shown["map"])
    which = [-1, *heard["which"]]
    begins = [heard["letters"][b] if a != b else "" for a, b in pairwise(which)]
    order = sorted(range(MEMBERS), key=lambda m: (m in OFFICERS, m))
    named = ["leader 1" if m == 0 else "leader 2" if m == MEMBERS - 1 else "" for m in order]
    return (
        HeatMap(
            f"A drawn {shown['digit']}", "What the vision transformer is given.",
            shown["picture"], [""] * SIDE, [""] * SIDE, "ink",
        ),
        HeatMap(
            "Where the class token looks", "One cell a patch, the mean over heads of the last "
            "block.",
            shown["map"], [""] * side, [""] * side, "share of attention",
        ),
        HeatMap(
            "Letters look at frames of sound", "Each row is a letter as it is written; below, the "
            "frame at which each begins to sound.",
            heard["weights"], heard["letters"], begins, "weight", y="writes", x="frames",
        ),
        HeatMap(
            "Friends look at friends", "The karate club, sorted by side. Where there is no "
            "friendship the weight is exactly 0.",
            [[graphs["shown"][a][b] for b in order] for a in order], named, named, "weight",
        ),
        _club(graphs),
        Lines(
            "A noisy key finds its value", "One call, no training. Lines are widths of keys.",
            "slots", "found",
            [Line(f"{width} wide", memory["slots"], found)
             for width, found in memory["recall"].items()],
            log_x=True, percent=True,
        ),
        HeatMap(
            "Questions find verses", "Rows are questions, columns the verses that they find, each "
            "named by the word that answers. The rest of a row's weight is on other verses.",
            passages["shown"], passages["questions"], passages["answers"], "weight",
            x="verse of Genesis with the word",
        ),
        Bars(
            "Where it should look", "Beside it: what chance, or no mask, would give.",
            "share", ["on ink", "on the letter", "sides right"],
            {"attention": [pictures["on_ink"], sounds["aligned"], graphs["accuracy"]["friends"]],
             "without": [pictures["ink"], sounds["chance"], graphs["accuracy"]["everyone"]]},
            percent=True,
        ),
    )  # fmt: skip
