"""Why queries, keys and values are three projections: the claim is in ABOUT, and run() tests it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import regard
from regard.lab.apparatus.experiments import About, Check, Progress, Result, Tell, seeded
from regard.lab.apparatus.panels import Bars, HeatMap, Line, Lines, Panel, smoothed

ABOUT = About(
    name="roles",
    title="Why queries, keys and values are three projections",
    claim=(
        "Attention between bare word vectors has nothing to learn, and cannot find the word that "
        "decides a sense. One projection for all learns to, but its scores are symmetric: it falls "
        "short where a word must look for one thing and offer another. Three projections succeed "
        "at both, with scores that are not symmetric."
    ),
    method=(
        "Word vectors are random and stay as they are. One head of attention mixes them, and a "
        "linear layer, which always learns, reads one of two senses from the result. Attention is "
        "static (no parameters: words are queries, keys and values themselves), has one "
        "projection for all three, or has three. Positions are rotary in all of them.",
        "Beside: a sentence of eight words holds an ambiguous noun, one word that decides its "
        "sense, and six that do not matter. Is “apple” with “phone” or with “eat”? Is “bank” with "
        "“river” or with “money”? Eight such nouns, sixteen such words, and the words that decide "
        "other nouns are there to mislead.",
        "Before: every word takes its sense from the word before it, as the bank does in “river "
        "bank” and in “money bank”, and decides that of the word after it. So each word looks back "
        "and is looked back at, and symmetric scores cannot serve both. In “a b a” b should score "
        "the first a above the second, in “b a b” a the first b above the second; but b scores the "
        "a after it just as that a scores the b before it, and the two wishes contradict each "
        "other. Nor can two words both prefer the other to themselves, as a·b is never above both "
        "a·a and b·b: much of the weight stays where it is. "
        "Looking at both neighbours alike would be right in 79% of places.",
        "The asymmetry of a matrix of scores S is the norm of (S − Sᵀ)/2 as a share of the norm of "
        "S: 0 if it is symmetric, 1 if S = −Sᵀ.",
    ),
    change=(
        "Give one projection to queries and another to keys, and let values be the words "
        "themselves: are two enough?",
        "Narrow the vectors (width=16), so that there are more words than numbers to tell them "
        "apart: which of the three still finds its word?",
        "Take the rotary positions out of Reader.roles: what becomes of “before”?",
    ),
    full={"steps": 3000, "width": 64, "batch": 128},
    seeds=3,
)

NOUNS = {
    "apple": ("phone", "eat"), "bank": ("river", "money"), "bat": ("cave", "ball"),
    "mouse": ("cheese", "screen"), "spring": ("rain", "coil"), "crane": ("nest", "steel"),
    "match": ("flame", "score"), "note": ("song", "letter"),
}  # fmt: skip
"""Ambiguous words, and the words that decide which of two senses each has."""
FILLERS = ("the", "a", "by", "with", "and", "near", "then", "this")
WORDS = [*NOUNS, *(cue for cues in NOUNS.values() for cue in cues), *FILLERS]
LENGTH = 8
KINDS = {"static": 0, "one": 1, "three": 3}
"""Kinds of attention, and how many projections each has."""
EXAMPLE = ("river", "bank", "phone", "apple", "money", "bank", "eat", "apple")


def run(
    *,
    seed: int = 0,
    width: int = 64,
    steps: int = 600,
    batch: int = 64,
    progress: Tell | None = None,
) -> Result:
    """Train the three kinds of attention on both tasks.

    >>> result = run(width=16, steps=1)
    >>> [round(result.numbers["asymmetry"][kind], 4) for kind in ("static", "one")]
    [0.0, 0.0]
    """
    step = Progress(steps * len(KINDS) * len(TASKS), progress)
    accuracy: dict[str, dict[str, list[float]]] = {}
    looks: dict[str, dict[str, float]] = {}
    models = {}
    for task, draw in TASKS.items():
        accuracy[task] = {}
        for kind in KINDS:
            with seeded(seed):
                model = models[task, kind] = Reader(kind, width)
                done = partial(step, f"{task}: {kind}")
                accuracy[task][kind] = train(model, draw, steps, batch, done)
    with seeded(seed + 1):
        for kind in KINDS:
            looks[kind] = where_it_looks(models["before", kind])
            looks[kind]["deciding word"] = on_the_deciding_word(models["beside", kind])
            final = {task: correct(models[task, kind], draw) for task, draw in TASKS.items()}
            looks[kind] |= {f"right, {task}": share for task, share in final.items()}
    sentence = torch.tensor([[WORDS.index(word) for word in EXAMPLE]])
    scores = {kind: models["before", kind].scores(sentence)[0] for kind in KINDS}
    numbers = {
        "measured": looks,
        "asymmetry": {kind: asymmetry(S) for kind, S in scores.items()},
        "scores": {kind: S.tolist() for kind, S in scores.items()},
        "sentence": EXAMPLE,
        "training": accuracy,
    }
    settings = {"seed": seed, "width": width, "steps": steps, "batch": batch}
    return Result(ABOUT, settings, _checks(numbers), _answer(numbers), numbers, _panels(numbers))


Task = tuple[Int[Tensor, "b n"], Int[Tensor, "b n"]]
"""Words, and the sense that is right at each place; -1 where none is asked for."""


def beside(batch: int) -> Task:
    """A noun, the word that decides its sense, and six others, in any order."""
    nouns, others = len(NOUNS), LENGTH - 2
    noun, sense = torch.randint(nouns, (batch, 1)), torch.randint(2, (batch, 1))
    other = (noun + torch.randint(1, nouns, (batch, others))) % nouns
    misleading = nouns + 2 * other + torch.randint(2, (batch, others))
    filler = 3 * nouns + torch.randint(len(FILLERS), (batch, others))
    rest = torch.where(torch.rand(batch, others) < 0.6, misleading, filler)
    words = torch.cat([noun, nouns + 2 * noun + sense, rest], 1)
    words = words.gather(1, torch.rand(batch, LENGTH).argsort(1))
    return words, torch.where(words < nouns, sense, -1)


def before(batch: int) -> Task:
    """Words in any order; each but the first has the sense that the word before it gives."""
    words = torch.randint(3 * len(NOUNS), (batch, LENGTH))
    gives = words % 2
    return words, torch.cat([torch.full((batch, 1), -1), gives[:, :-1]], 1)


TASKS: dict[str, Callable[[int], Task]] = {"beside": beside, "before": before}


class Reader(nn.Module):
    """Fixed word vectors, one head of attention of a kind, and a layer that reads the sense."""

    words: Tensor

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.register_buffer("words", torch.randn(len(WORDS), width))
        self.projections = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(KINDS[kind])
        )
        self.rotary = regard.nn.Rotary()
        # A sense is one of two, told apart for each word.
        self.read = nn.Linear(width, 2 * len(WORDS))

    def roles(self, words: Int[Tensor, "b n"]) -> list[Float[Tensor, "b 1 n d"]]:
        """The words as queries, keys and values."""
        x = self.words[words][:, None]
        q, *others = [project(x) for project in self.projections] or [x]
        k, v = others or (q, q)
        return [self.rotary(q), self.rotary(k), v]

    def look(self, words: Int[Tensor, "b n"]) -> regard.Trace:
        """What attention does with the words."""
        return regard.trace(*self.roles(words))

    def forward(self, words: Int[Tensor, "b n"]) -> Float[Tensor, "b n 2"]:
        mixed = self.words[words] + regard.attention(*self.roles(words))[:, 0]
        senses = self.read(mixed).unflatten(-1, (len(WORDS), 2))
        own = words[..., None, None].expand(*words.shape, 1, 2)
        found: Tensor = senses.gather(2, own)[:, :, 0]
        return found

    @torch.no_grad()
    def scores(self, words: Int[Tensor, "b n"]) -> Float[Tensor, "b n n"]:
        """The scores before softmax; a weight that is 0 would not tell them."""
        q, k, _ = self.roles(words)
        scores: Tensor = (q @ k.mT)[:, 0] / q.shape[-1] ** 0.5
        return scores


def train(
    model: Reader, draw: Callable[[int], Task], steps: int, batch: int, done: Callable[[], None]
) -> list[float]:
    """The share of senses that were right at each step; every batch is new."""
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    right = []
    for _ in range(steps):
        words, sense = draw(batch)
        logits, asked = model(words), sense >= 0
        loss = cross_entropy(logits[asked], sense[asked])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        right.append(float((logits.argmax(-1) == sense)[asked].float().mean()))
        done()
    return right


@torch.no_grad()
def correct(model: Reader, draw: Callable[[int], Task], count: int = 1024) -> float:
    """The share of senses that are right in new sentences."""
    words, sense = draw(count)
    asked = sense >= 0
    return float((model(words).argmax(-1) == sense)[asked].float().mean())


@torch.no_grad()
def where_it_looks(model: Reader, count: int = 512) -> dict[str, float]:
    """The mean weight that words give the word before them, themselves, and the word after."""
    weights = model.look(before(count)[0]).weights()[:, 0, 1:-1]
    at = {"before": 0, "itself": 1, "after": 2}
    return {name: float(weights.diagonal(shift, 1, 2).mean()) for name, shift in at.items()}


@torch.no_grad()
def on_the_deciding_word(model: Reader, count: int = 512) -> float:
    """The mean weight that a noun gives the word that decides its sense."""
    words, sense = beside(count)
    noun = words.masked_fill(sense < 0, -1).amax(1, keepdim=True)
    decides = (words - len(NOUNS)).div(2, rounding_mode="floor") == noun
    weights = model.look(words).weights()[:, 0]
    return float(weights[sense >= 0][decides].mean())


def asymmetry(S: Float[Tensor, "n n"]) -> float:
    """The share of a matrix that changes its sign when it is turned over.

    >>> asymmetry(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
    0.0
    >>> asymmetry(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
    1.0
    """
    return float((S - S.T).norm() / 2 / S.norm())


def _checks(numbers: dict[str, Any]) -> tuple[Check, ...]:
    static, one, three = (numbers["measured"][kind] for kind in KINDS)
    S = list(numbers["asymmetry"].values())
    return (
        Check(
            "static attention cannot find the word that decides",
            f"{static['right, beside']:.0%} right beside, {static['right, before']:.0%} before; "
            "chance is 50%",
            max(static["right, beside"], static["right, before"]) < 0.6,
        ),
        Check(
            "one projection learns to find it",
            f"{one['right, beside']:.0%} right beside",
            one["right, beside"] > 0.9,
        ),
        Check(
            "its scores are symmetric",
            f"asymmetry {S[1]:.2g}, static {S[0]:.2g}",
            all(share < 1e-4 for share in S[:2]),
        ),
        Check(
            "so it falls short where every word looks one way",
            f"{one['right, before']:.0%} right before; {one['before']:.0%} of the weight on the "
            f"word before, {one['itself']:.0%} on itself",
            one["right, before"] < 0.9,
        ),
        Check(
            "three projections succeed at both",
            f"{three['right, beside']:.0%} right beside, {three['right, before']:.0%} before",
            min(three["right, beside"], three["right, before"]) > 0.95,
        ),
        Check("with scores that are not symmetric", f"asymmetry {S[2]:.2f}", S[2] > 0.2),
    )


def _answer(numbers: dict[str, Any]) -> str:
    static, one, three = (numbers["measured"][kind] for kind in KINDS)
    beside, before, S = "right, beside", "right, before", numbers["asymmetry"]
    return (
        "Where the deciding word stands anywhere, static attention is right in "
        f"{static[beside]:.0%} of sentences (chance is 50%), one projection in {one[beside]:.0%} "
        f"and three in {three[beside]:.0%}; the noun gives the deciding word "
        f"{static['deciding word']:.0%}, {one['deciding word']:.0%} and "
        f"{three['deciding word']:.0%} of its weight. Where every word is decided by the one "
        f"before it, they are right in {static[before]:.0%}, {one[before]:.0%} and "
        f"{three[before]:.0%} of places: with one projection a word gives itself "
        f"{one['itself']:.0%} and the word before {one['before']:.0%}, with three "
        f"{three['itself']:.0%} and {three['before']:.0%}. The asymmetry of their scores is "
        f"{S['static']:.2f}, {S['one']:.2f} and {S['three']:.2f}."
    )


def _panels(numbers: dict[str, Any]) -> tuple[Panel, ...]:
    training, looks = numbers["training"], numbers["measured"]
    curves = [
        Lines(title, caption, "step", "senses that are right",
              [Line(kind, *smoothed(right)) for kind, right in training[task].items()],
              percent=True)
        for task, title, caption in (
            ("beside", "Beside: one word in the sentence decides",
             "Static attention stays at chance; whatever can learn finds the word."),
            ("before", "Before: the word before decides",
             "One projection cannot look back from every word, and stays short of it."),
        )
    ]  # fmt: skip
    places = ("before", "itself", "after")
    bars = Bars(
        "Before: where a word looks",
        "With one projection a word is its own best match; with three it looks back.",
        "share of the weight", places,
        {kind: [looks[kind][place] for place in places] for kind in KINDS}, percent=True,
    )  # fmt: skip
    words = numbers["sentence"]
    heats = [
        HeatMap(f"Scores, {named}: asymmetry {numbers['asymmetry'][kind]:.2f}", caption,
             numbers["scores"][kind], words, words, "score", y="looks", x="at", signed=True)
        for kind, (named, caption) in _SEEN.items()
    ]  # fmt: skip
    return (*curves, bars, *heats)


_SEEN = {
    "static": (
        "static",
        "The same on both sides of the diagonal; a word resembles itself, and its double.",
    ),
    "one": (
        "one projection",
        "Learned, and still the same on both sides of the diagonal.",
    ),
    "three": (
        "three projections",
        "Strongest just below the diagonal, which is the word before, and not above it.",
    ),
}
