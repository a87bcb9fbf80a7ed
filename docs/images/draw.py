"""Draws the pictures of these docs: stories15M, a Llama of 15 million parameters, reads a story,
and the translator of this package a question.

python docs/images/draw.py    # from the root of the repository; fetches the model once
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

import regard
from regard import models
from regard.seen import Seen
from regard.view import picture

HERE = Path(__file__).parent


def seen_of(tokens: int) -> Seen:
    """What its attention does with the beginning of the story."""
    sys.path.insert(0, str(HERE.parents[1]))
    from tests.real.stories import pieces, stories

    model, words = stories("sdpa"), pieces()
    told = model.generate(
        torch.tensor([[1]]), max_new_tokens=240, do_sample=False, eos_token_id=None
    )[:, :tokens]
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        model(told)
    seen.tokens = [words[i].replace("\n<s>\n", "<s>") for i in told[0].tolist()]
    return seen


def alignment() -> Figure:
    """Which word the translator looks at while it writes each of its own."""
    model = models.load("regard-king-james", device="cpu")
    text = "Where did you come from, and where are you going? I don't know, he answered."
    written = model.writes(model.generate(text))
    layer, head = "decoder.2.memory", 3
    return picture.heat_map(
        model.run(text), model.read(text), layer=layer, head=head, queries=written,
        title=f"{layer}, head {head}",
    )  # fmt: skip


def main() -> None:
    picture.save(alignment(), HERE / "alignment.png", dpi=110)
    short, long = seen_of(26), seen_of(241)
    figures = {
        "heat_map": picture.heat_map(short, layer=5, head=3),
        "heat_map_dark": picture.heat_map(short, layer=5, head=3, dark=True),
        "long": picture.heat_map(long, layer=2, head=1),
        "heads": picture.head_grid(long),
        "entropy": picture.entropy_by_layer(long),
        "arcs": picture.arcs(short, layer=5, head=3, threshold=0.15),
        "token": picture.arcs(short, token=10, layer=5, head=3, dark=True),
    }
    for name, figure in figures.items():
        picture.save(figure, HERE / f"{name}.png", dpi=144)


if __name__ == "__main__":
    main()
