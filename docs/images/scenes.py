"""A model of pictures that learns in a minute: where is the sun, and where is the tree?"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.nn.functional import cross_entropy

import regard
from regard.seen import Seen
from regard.view import Patches

GRID, SIDE = 12, 96


def scene(sun: Tensor, tree: Tensor, hill: Tensor, side: int = SIDE) -> Tensor:
    """Pictures [n, 3, side, side] of a sun [n, 2], a tree [n, 2] and a hill [n], from 0 to 1."""
    at = (torch.arange(side) + 0.5) / side
    down, across = at[:, None], at[None, :]
    sun_y, sun_x, tree_y, tree_x = (p[:, None, None] for p in (*sun.unbind(1), *tree.unbind(1)))
    land = down > 0.72 + 0.07 * torch.sin(5 * across + hill[:, None, None])
    round_sun = (down - sun_y) ** 2 + (across - sun_x) ** 2 < 0.075**2
    trunk = ((across - tree_x).abs() < 0.015) & (down > tree_y) & (down < tree_y + 0.22)
    crown = (down - tree_y) ** 2 + (across - tree_x) ** 2 < 0.09**2
    sky = torch.stack([0.45 + 0.3 * down, 0.65 + 0.15 * down, 0.95 - 0.1 * down])
    found = sky.expand(3, side, side).expand(len(sun), 3, side, side).clone()
    for where, colour in (
        (land, (0.36, 0.58, 0.28)),
        (round_sun, (1.0, 0.85, 0.3)),
        (trunk, (0.4, 0.26, 0.14)),
        (crown, (0.13, 0.38, 0.18)),
    ):
        found = torch.where(where[:, None], torch.tensor(colour)[:, None, None], found)
    return found


def some(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random places of suns, trees and hills."""
    sun = torch.rand(n, 2) * torch.tensor([0.3, 0.84]) + 0.08
    tree = torch.rand(n, 2) * torch.tensor([0.12, 0.76]) + torch.tensor([0.55, 0.12])
    return sun, tree, 6 * torch.rand(n)


class Finder(Module):
    """Patches, two blocks of attention, and a token that gathers the answer."""

    def __init__(self, d_model: int = 48, heads: int = 4) -> None:
        super().__init__()
        patch = SIDE // GRID
        self.patch = torch.nn.Conv2d(3, d_model, patch, patch)
        self.place = Parameter(torch.randn(GRID * GRID, d_model) / 4)
        self.gather = Parameter(torch.zeros(1, 1, d_model))
        self.blocks = torch.nn.ModuleList(regard.nn.EncoderBlock(d_model, heads) for _ in range(2))
        self.answer = Linear(d_model, 3 * GRID)

    def forward(self, pictures: Tensor) -> Tensor:
        """How likely each row and column of the sun, and column of the tree: [n, 3, GRID]."""
        x = self.patch(4 * (pictures - 0.6)).flatten(2).mT + self.place
        x = torch.cat([self.gather.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.answer(x[:, 0]).unflatten(-1, (3, GRID))


def trained(steps: int = 600) -> Finder:
    torch.manual_seed(0)
    model = Finder()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for step in range(steps):
        sun, tree, hill = some(32)
        wanted = (GRID * torch.stack([sun[:, 0], sun[:, 1], tree[:, 1]], 1)).long()
        found = model(scene(sun, tree, hill))
        loss = cross_entropy(found.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            right = (found.argmax(-1) == wanted).float().mean()
            print(f"step {step + 1}: loss {loss:.2f}, {right:.0%} of places right")
    return model.eval()


def seen() -> tuple[Seen, Patches]:
    """What the model does with one scene, and the scene, larger than the model saw it."""
    model = trained()
    place = torch.tensor([[0.2, 0.73]]), torch.tensor([[0.6, 0.3]]), torch.tensor([1.0])
    with torch.no_grad(), regard.watch(model, keep="traces") as found:
        model(scene(*place))
    return found, Patches(scene(*place, side=480)[0], (GRID, GRID), before=["CLS"])
