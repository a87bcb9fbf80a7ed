"""One mechanism over pictures, sounds, graphs and memories.

CLAIM: Attention asks only for a set of vectors. Patches of a picture, frames of a sound, nodes of a
graph and slots of a memory are read by the same call; what differs is who asks, and the mask.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import regard
from regard import masks, scores
from regard.lab.apparatus.experiments import About, Progress, Result, Tell, seeded
from regard.lab.material.drawn_digits import SIDE, draw
from regard.lab.material.karate_club import MEMBERS, friendships, sides
from regard.lab.material.played_letters import BINS, LETTERS, WORD, play
from regard.lab.material.text import king_james
from regard.lab.order import sinusoids
from regard.lab.reports.domains import answer, checks, panels
from regard.nn import DecoderBlock, EncoderBlock, MultiHeadAttention

ABOUT = About(
    name="domains",
    title="One mechanism over pictures, sounds, graphs and memories",
    claim=(
        "Attention asks only for a set of vectors. Patches of a picture, frames of a sound, nodes "
        "of a graph and slots of a memory are read by the same call; what differs is who asks and "
        "what the mask allows. Where it looks can be read off, and is where the answer lies."
    ),
    method=(
        "Pictures: a vision transformer of two blocks reads digits as 36 patches and a class "
        "token. The digits are drawn by a program, each turned, slanted, stretched and moved, with "
        "noise; they are easier than handwriting. We ask how much of the class token's attention "
        "falls on patches with ink.",
        "Sounds: words of six letters are played, one chord a letter, for a random time each, with "
        "noise. These are synthetic tones, not speech. Frames of the spectrum are one sequence, "
        "letters the other, shorter one; a decoder writes the letters and looks at the frames. We "
        "ask how much of its attention falls on frames in which the letter sounds.",
        "Graphs: Zachary's karate club, 34 members who split in two (1977). The mask is who is "
        "friends with whom. Only the sides of the two leaders are told; a model of two layers says "
        "the side of all others. The same without the mask, five models each.",
        "Memory: values are stored under random keys and asked for with noisy ones, in one call "
        "without training (scores.cosine). And questions look up passages: the first 600 verses of "
        "Genesis, as bags of words weighted by rarity.",
    ),
    change=(
        "Draw digits that were never moved: does the class token still look at ink?",
        "Play two letters at once: where does the decoder look?",
        "Add friends of friends to the mask of the graph. Does one layer do then?",
        "Raise the temperature of the memory: when does a soft lookup become a blur?",
    ),
    full={"steps": 1500, "asked": 2000},
    seeds=3,
)  # fmt: skip

PATCH, WIDTH = 4, 48
QUESTIONS = {
    "what was in the mouth of the dove": "olive",
    "who was a mighty hunter": "nimrod",
    "for how many days prevailed the waters": "hundred and fifty",
    "what was the dry land called": "earth",
}
"""And a word of the verse that answers."""


def run(
    *,
    seed: int = 0,
    steps: int = 800,
    models: int = 5,
    asked: int = 400,
    progress: Tell | None = None,
) -> Result:
    """Read pictures, sounds, a graph (by so many models) and memories, and see where each looks."""
    step = Progress(2 * steps + 2 * models, progress)
    with seeded(seed):
        pictures = of_pictures(steps, lambda: step("pictures"))
    with seeded(seed):
        sounds = of_sounds(steps, lambda: step("sounds"))
    with seeded(seed):
        graphs = of_graphs(models, lambda: step("graphs"))
        memory = of_memory(asked, (4, 16, 64, 256, 1024), (4, 8, 16, 32))
    numbers = {"pictures": pictures, "sounds": sounds, "graphs": graphs, "memory": memory}
    settings = {"seed": seed, "steps": steps, "models": models, "asked": asked}
    return Result(ABOUT, settings, checks(numbers), answer(numbers), numbers, panels(numbers))


class Digits(nn.Module):
    """A vision transformer: patches and a class token that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH**2, WIDTH)
        self.asks = nn.Parameter(0.3 * torch.randn(1, 1, WIDTH))
        self.place = nn.Parameter(0.3 * torch.randn((SIDE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList(EncoderBlock(WIDTH, 4, hidden=2 * WIDTH) for _ in range(2))
        self.digit = nn.Linear(WIDTH, 10)

    def forward(self, pictures: Float[Tensor, "b s s"]) -> Float[Tensor, "b d"]:
        x = self.patch(patches(pictures)) + self.place
        x = torch.cat([self.asks.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        said: Tensor = self.digit(x[:, 0])
        return said


def patches(pictures: Float[Tensor, "b s s"]) -> Float[Tensor, "b n p"]:
    """Squares of a picture, row by row."""
    return pictures.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)


def of_pictures(steps: int, done: Callable[[], None]) -> dict[str, Any]:
    """Accuracy on new digits, and where the class token looks."""
    model = Digits()
    drawn, digits = draw(min(3000, 48 * steps))

    def loss() -> Tensor:
        some = torch.randint(len(drawn), (48,))
        return cross_entropy(model(drawn[some]), digits[some])

    _train(model, steps, loss, done)
    pictures, right = draw(400)
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        said = model(pictures)
    trace = list(seen.values())[-1].trace
    looks = trace.weights(queries=[0])[..., 0, 1:].mean(1)
    looks = looks / looks.sum(-1, keepdim=True)
    inked = patches(pictures).amax(-1) > 0.5
    side, one = SIDE // PATCH, int((right == 3).nonzero()[0])
    return {
        "accuracy": float((said.argmax(-1) == right).float().mean()),
        "on_ink": float((looks * inked).sum(-1).mean()),
        "ink": float(inked.float().mean()),
        "shown": {"digit": int(right[one]), "picture": pictures[one].tolist(),
                  "map": looks[one].reshape(side, side).tolist()},
    }  # fmt: skip


class Listener(nn.Module):
    """Writes letters, looking at frames of sound."""

    def __init__(self) -> None:
        super().__init__()
        self.frame = nn.Linear(BINS, WIDTH)
        self.letter = nn.Embedding(len(LETTERS) + 1, WIDTH)
        self.hears = EncoderBlock(WIDTH, 4, hidden=2 * WIDTH)
        self.writes = DecoderBlock(WIDTH, 4, hidden=2 * WIDTH)
        self.next = nn.Linear(WIDTH, len(LETTERS))

    def forward(
        self, frames: Float[Tensor, "b t f"], lengths: Int[Tensor, "b"], told: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b n l"]:
        sound, written = self.frame(frames), self.letter(told)
        sound = sound + 0.3 * sinusoids(sound.shape[1], WIDTH)
        written = written + 0.3 * sinusoids(written.shape[1], WIDTH)
        present = masks.padding(lengths)
        x = self.writes(written, self.hears(sound, mask=present), memory_mask=present)
        said: Tensor = self.next(x)
        return said


def of_sounds(steps: int, done: Callable[[], None]) -> dict[str, Any]:
    """Letters that are right, and how much of the attention falls where they sound."""
    model = Listener()

    def told(word: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        return torch.cat([torch.full_like(word[:, :1], len(LETTERS)), word[:, :-1]], 1)

    def loss() -> Tensor:
        frames, lengths, word, _ = play(32)
        return cross_entropy(model(frames, lengths, told(word)).mT, word)

    _train(model, steps, loss, done)
    frames, lengths, word, which = play(128)
    with torch.no_grad(), regard.watch(model, layers=["writes.memory"], keep="traces") as seen:
        said = model(frames, lengths, told(word))
    weights = next(iter(seen.values())).trace.weights().mean(1)
    sounding = which[:, None] == torch.arange(WORD)[:, None]
    length = int(lengths[0])
    return {
        "accuracy": float((said.argmax(-1) == word).float().mean()),
        "aligned": float((weights * sounding).sum(-1).mean()),
        "chance": 1 / WORD,
        "shown": {"letters": [LETTERS[i] for i in word[0].tolist()],
                  "weights": weights[0, :, :length].tolist(), "which": which[0, :length].tolist()},
    }  # fmt: skip


class Sides(nn.Module):
    """Says each member's side from who they are and whom they may look at."""

    def __init__(self, members: int, width: int = 16) -> None:
        super().__init__()
        self.member = nn.Parameter(0.3 * torch.randn(members, width))
        self.layers = nn.ModuleList(MultiHeadAttention(width, 2) for _ in range(2))
        self.side = nn.Linear(width, 2)

    def forward(self, mask: masks.Mask | None) -> Float[Tensor, "m s"]:
        x = self.member[None]
        for layer in self.layers:
            x = layer(x, mask=mask).tanh()
        said: Tensor = self.side(x[0])
        return said


def of_graphs(models: int, done: Callable[[], None]) -> dict[str, Any]:
    """The members whose side is said rightly, from the sides of the two leaders alone."""
    known = friendships()
    side = sides()
    leaders, others = torch.tensor([0, MEMBERS - 1]), torch.arange(1, MEMBERS - 1)
    right: dict[str, list[float]] = {"friends": [], "everyone": []}
    shown: Tensor | None = None
    told: list[int] = []
    for name, mask in (("friends", masks.keep(known[None, None])), ("everyone", None)):
        for _ in range(models):
            model = Sides(MEMBERS)

            def loss(model: Sides = model, mask: masks.Mask | None = mask) -> Tensor:
                return cross_entropy(model(mask)[leaders], side[leaders])

            _train(model, 100, loss, lambda: None, rate=1e-2)
            with torch.no_grad(), regard.watch(model, keep="traces") as seen:
                said = model(mask).argmax(-1)
            right[name].append(float((said[others] == side[others]).float().mean()))
            if shown is None:
                shown = next(iter(seen.values())).trace.weights()[0].mean(0)
                told = said.tolist()
            done()
    assert shown is not None
    return {
        "accuracy": {name: sum(found) / len(found) for name, found in right.items()},
        "each": right,
        "outside": float(shown[~known].sum()),
        "shown": shown.tolist(),
        "told": told,
        "right": (torch.tensor(told) == side).tolist(),
    }


def of_memory(asked: int, slots: Sequence[int], widths: Sequence[int]) -> dict[str, Any]:
    """How often a noisy key finds its value, by the width of keys and the number of slots."""
    recall: dict[int, list[float]] = {}
    for width in widths:
        recall[width] = []
        for count in slots:
            keys, values = torch.randn(count, width), torch.arange(count)
            wanted = torch.randint(count, (asked,))
            noisy = keys[wanted] + 0.7 * torch.randn(asked, width)
            # Only the strongest slot is asked for, so values of width 1 do.
            found = regard.trace(noisy, keys, keys[:, :1], score=scores.cosine(0.05)).top(1)
            right = values[found.indices.squeeze(-1)] == wanted
            recall[width].append(float(right.float().mean()))
    return {"slots": list(slots), "recall": recall, "passages": of_passages()}


def of_passages(verses: int = 600) -> dict[str, Any]:
    """What each question finds in the first verses of Genesis, in one soft lookup."""
    texts = king_james().split("\n")[:verses]
    split = [re.findall(r"[a-z']+", text) for text in texts]
    seen = Counter(word for words in split for word in set(words))
    place = {word: i for i, word in enumerate(seen)}
    rarity = torch.tensor([verses / count for count in seen.values()]).log()

    def vector(words: Sequence[str]) -> Float[Tensor, "v"]:
        ids = torch.tensor([place[word] for word in words if word in place])
        return one_hot(ids, len(place)).sum(0).clamp(max=1) * rarity

    keys = torch.stack([vector(words) for words in split])
    asked = torch.stack([vector(question.split()) for question in QUESTIONS])
    trace = regard.trace(asked, keys, keys, score=scores.cosine(0.03))
    top = trace.top(1)
    best = top.indices.squeeze(-1).tolist()
    return {
        "questions": list(QUESTIONS),
        "answers": list(QUESTIONS.values()),
        "found": [texts[i] for i in best],
        "weight": top.values.squeeze(-1).tolist(),
        "right": [word in texts[i] for word, i in zip(QUESTIONS.values(), best, strict=True)],
        "shown": trace.weights(keys=best).tolist(),
    }


def _train(
    model: nn.Module,
    steps: int,
    loss: Callable[[], Tensor],
    done: Callable[[], None],
    rate: float = 3e-3,
) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    for i in range(steps):
        optimiser.param_groups[0]["lr"] = rate * min(1.0, (i + 1) / 20)
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
        done()
