"""A small model that paints things from a prompt, by flow matching, and what it is taught with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import regard
from regard import interpret

NUMBERS = ("one", "two", "three", "four", "five", "six")
COLOURS = {"red": (1.0, -1.0, -1.0), "green": (-1.0, 1.0, -1.0), "blue": (-1.0, -1.0, 1.0)}
SHAPES = {
    "pluses": ((0, 1, 0), (1, 1, 1), (0, 1, 0)),
    "squares": ((1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "crosses": ((1, 0, 1), (0, 1, 0), (1, 0, 1)),
}
WORDS = [*NUMBERS, *COLOURS, *SHAPES, "."]
ROLES = ("number", "colour", "noun", "stop")
"""What the four words of a prompt are."""
SIDE, PATCH = 8, 3
"""Tokens along a side of the picture, and pixels along a side of a token."""
PIXELS = 3 * PATCH**2
STROKES = 20
"""Steps from noise to a picture."""


def draw(count: int) -> tuple[Int[Tensor, "b 4"], Float[Tensor, "b tokens pixels"]]:
    """Prompts, and pictures of them: things in different tokens that do not touch."""
    number, colour, shape = (torch.randint(n, (count,)) for n in (6, 3, 3))
    there = torch.zeros(count, SIDE * SIDE, dtype=torch.bool)
    left = torch.arange(count)
    around = torch.ones(1, 1, 3, 3)
    while len(left):
        some = torch.rand(len(left), SIDE * SIDE).argsort(1) <= number[left, None]
        grid = some.reshape(-1, 1, SIDE, SIDE).float()
        near = nn.functional.conv2d(grid, around, padding=1) - grid
        apart = ~((near > 0) & (grid > 0)).flatten(1).any(1)
        there[left[apart]] = some[apart]
        left = left[~apart]
    hues = torch.tensor(list(COLOURS.values()))[colour]
    forms = torch.tensor(list(SHAPES.values())).float()[shape]
    thing = (hues[:, :, None, None] * forms[:, None]).flatten(1)
    stop = torch.full((count,), len(WORDS) - 1)
    prompt = torch.stack([number, len(NUMBERS) + colour, 9 + shape, stop], 1)
    return prompt, there[..., None] * thing[:, None]


class Painter(nn.Module):
    """Guesses the finished picture from a noisy one, the time and the words."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), width)
        self.seen = nn.Linear(PIXELS, width)
        self.places = nn.Parameter(0.3 * torch.randn(SIDE * SIDE, width))
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(
            regard.nn.DecoderBlock(width, heads, hidden=2 * width) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.guess = nn.Linear(width, PIXELS)
        nn.init.zeros_(self.guess.weight)

    def forward(
        self,
        x: Float[Tensor, "b tokens pixels"],
        time: Float[Tensor, "b"],
        words: Int[Tensor, "b 4"],
    ) -> Float[Tensor, "b tokens pixels"]:
        angle = 3 * time[:, None] * torch.linspace(0, 4, 8).exp()
        now = self.time(torch.cat([angle.sin(), angle.cos()], 1))
        h, memory = self.seen(x) + self.places + now[:, None], self.words(words)
        for block in self.blocks:
            h = block(h, memory, mask=None)
        guess: Tensor = self.guess(self.norm(h))
        return guess


def train(model: Painter, steps: int, batch: int, done: Callable[[], None]) -> list[float]:
    """The loss of each step. Noise and picture are mixed in all proportions, and the error counts
    as that of the direction from one to the other."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prompts, pictures = draw(8192)
    losses = []
    for step in range(steps):
        rate = min(1, (step + 1) / 50) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        optimiser.param_groups[0]["lr"] = 3e-3 * rate
        which = torch.randint(len(prompts), (batch,))
        x, time = pictures[which], 0.9 * torch.rand(batch)
        share = time[:, None, None]
        noisy = (1 - share) * torch.randn_like(x) + share * x
        error = (model(noisy, time, prompts[which]) - x) / (1 - share).clamp(min=0.25)
        loss = error.square().mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
        done()
    return losses


class Painted(NamedTuple):
    """What came of painting."""

    words: Int[Tensor, "b 4"]
    maps: Float[Tensor, "words b steps layers tokens"]
    noisy: Float[Tensor, "steps b tokens pixels"]
    guesses: Float[Tensor, "steps b tokens pixels"]
    finished: Float[Tensor, "b tokens pixels"]


@torch.no_grad()
def paint(model: Painter, words: Int[Tensor, "b 4"], done: Callable[[], None]) -> Painted:
    """Pictures from noise, straight ahead to what the model guesses at each step."""
    x = torch.randn(len(words), SIDE * SIDE, PIXELS)
    noisy, guesses = [], []
    model.eval()
    with interpret.grounding(
        model, ROLES, keep=("batch", "steps", "layers"), layers="blocks.*.memory"
    ) as look:
        for step in range(STROKES):
            guess = model(x, torch.full((len(words),), step / STROKES), words)
            noisy.append(x)
            guesses.append(guess)
            x = x + (guess - x) / (STROKES - step)
            done()
    return Painted(
        words=words,
        maps=look.found.maps.flatten(-3),
        noisy=torch.stack(noisy),
        guesses=torch.stack(guesses),
        finished=x,
    )
