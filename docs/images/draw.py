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
from regard import interpret, models
from regard.lab.apparatus.experiments import seeded
from regard.lab.models import painter
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


def word_maps(model: painter.Painter | None = None) -> Figure:
    """A painting of the lab's painter with the maps of its words, half way."""
    with seeded(0):
        if model is None:
            model = painter.Painter(48, 3, 2)
            painter.train(model, 1500, 32, lambda: None)
    with seeded(5), torch.no_grad():
        words = torch.tensor([[3, 6, 10, 12]])
        tokens = [painter.WORDS[word] for word in words[0].tolist()]
        x, middle = torch.randn(1, 64, 27), painter.STROKES // 2
        how = {"layers": "blocks.*.memory", "steps": range(middle, middle + 3)}
        with interpret.grounding(model.eval(), tokens, **how) as look:
            for step in range(painter.STROKES):
                guess = model(x, torch.tensor([step / painter.STROKES]), words)
                x = x + (guess - x) / (painter.STROKES - step)
    grid = x.unflatten(1, (8, 8)).unflatten(-1, (3, 3, 3))[0]
    pixels = grid.permute(2, 0, 3, 1, 4).reshape(3, 24, 24)
    return picture.word_maps(look.found, picture=((pixels + 1) / 2).clamp(0, 1), threshold=0.6)


def main() -> None:
    picture.save(alignment(), HERE / "alignment.png", dpi=110)
    picture.save(word_maps(), HERE / "word_maps.png", dpi=144)
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
