"""What heads do, and what several of them are for.

CLAIM: Heads specialise. A model of two layers grows heads that look at the token before, and on top
of them heads that look for what followed the last time (induction); without either kind, what is
said again is no longer foreseen, while as many others are hardly missed. Eight heads predict better
than one at equal parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import regard
from regard import interpret, masks
from regard.interpret.interventions import Replaced
from regard.lab.apparatus.experiments import About, Progress, Result, Tell, seeded
from regard.lab.material.text import Corpus
from regard.lab.reports.heads import DOES, answer, called, checks, panels
from regard.nn import MultiHeadAttention, Rotary

ABOUT = About(
    name="heads",
    title="What heads do, and why there are several",
    claim=(
        "Heads specialise. A model of two layers grows heads that look at the token before, and on "
        "top of them heads that look for what followed the last time (induction heads); without "
        "either kind, the model no longer foresees what is said again, while as many other heads "
        "of the same layer are hardly missed. Eight heads predict better than one at equal "
        "parameters."
    ),
    method=(
        "The model is two layers of attention, no feed-forward network between them, with rotary "
        "positions. It reads the King James Bible as words: the most frequent ones, and one token "
        "for all others. Every second window of text is replaced by words drawn at random and said "
        "again and again, with a period that changes from window to window: the only way to "
        "foresee these is to look back. In plain text repetition is rarer, and the same heads "
        "need longer to grow.",
        "As it trains, every head is asked how much it looks at the token before (previous), and, "
        "where random words are said a second time, how much at the word that followed the first "
        "time (induction). Weights come from regard.watch. Then heads are silenced: each alone, "
        "all of a kind, and one after another, those first that text misses least. A silent head "
        "gives nothing, or, which takes away less, the mean of what it gives everywhere "
        "(interpret.ablate). Beside all heads of a kind, as many others of the same layer are "
        "silenced, drawn five times; all of them, where there are fewer.",
        "One head as wide as the model has exactly as many parameters as eight of an eighth. It is "
        "trained on the same windows. All of it is done with three seeds.",
    ),
    change=(
        "Take the repeated windows away (repeats=0): do induction heads still grow?",
        "Give the model one layer (layers=1): what is said again cannot be foreseen. Why?",
        "Try heads=2 and heads=16. At which number does text stop gaining?",
        "Replace Rotary() by None: does a causal mask alone say which token came before?",
    ),
    full={"steps": 4000, "vocabulary": 192, "seeds": 3},
    seeds=3,
)

DRAWS = 5
"""How often as many other heads are drawn."""


def run(
    *,
    seed: int = 0,
    width: int = 64,
    heads: int = 8,
    layers: int = 2,
    vocabulary: int = 96,
    length: int = 32,
    batch: int = 32,
    repeats: float = 0.6,
    steps: int = 1000,
    seeds: int = 3,
    progress: Tell | None = None,
) -> Result:
    """Train with several heads and with one, look at every head as it grows, and silence each."""
    step = Progress(2 * steps * seeds, progress)
    every = []
    for s in range(seed, seed + seeds):
        trained, model = {}, None
        for count in (1, heads):
            with seeded(s):
                data = Windows(Corpus.words(vocabulary), length, batch, repeats)
                model = Reader(vocabulary, width, count, layers)
                trained[called(count)] = train(model, data, steps, lambda: step("training"))
        assert model is not None
        with seeded(s + 1):
            silenced = silence_each(model, data, s)
            one, shown = picture_of(model, data)
        every.append(
            {"trained": trained, "silenced": silenced, "shown": {"words": shown, "weights": one}}
        )
    assert model is not None
    numbers = {"parameters": sum(p.numel() for p in model.parameters()), "seeds": every}
    settings = {"seed": seed, "width": width, "heads": heads, "layers": layers,
                "vocabulary": vocabulary, "length": length, "batch": batch, "repeats": repeats,
                "steps": steps, "seeds": seeds}  # fmt: skip
    several = called(heads)
    found = (numbers, several)
    return Result(ABOUT, settings, checks(*found), answer(*found), numbers, panels(*found))


class Reader(nn.Module):
    """Layers of attention alone over words, which say what comes next."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.word.weight, std=0.3)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers + 1))
        self.layers: Any = nn.ModuleList(
            MultiHeadAttention(width, heads, rotary=Rotary()) for _ in range(layers)
        )

    def forward(self, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n v"]:
        x = self.word(ids)
        for norm, attention in zip(self.norms, self.layers, strict=False):
            x = x + attention(norm(x), mask=masks.causal())
        logits: Tensor = self.norms[-1](x) @ self.word.weight.T
        return logits


class Windows:
    """Windows of text, and of random words said again and again."""

    def __init__(self, corpus: Corpus, length: int, batch: int, repeats: float) -> None:
        self.corpus, self.length, self.half = corpus, length, length // 2
        self.repeated = round(batch * repeats)
        self.plain = batch - self.repeated
        cut = len(corpus.ids) * 9 // 10
        self.learned, self.held = corpus.ids[:cut], corpus.ids[cut:]
        self.held_text = self._cut(self.held, 256)
        self.twice = self.said(torch.full((64,), self.half))

    def draw(self) -> Int[Tensor, "b n"]:
        """A batch to learn from."""
        periods = torch.randint(self.half // 2, self.half + 1, (self.repeated,))
        return torch.cat([self._cut(self.learned, self.plain), self.said(periods)])

    def _cut(self, ids: Int[Tensor, "all"], count: int) -> Int[Tensor, "b n"]:
        starts = torch.randint(len(ids) - self.length, (count, 1))
        return ids[starts + torch.arange(self.length + 1)]

    def said(self, periods: Int[Tensor, "b"]) -> Int[Tensor, "b n"]:
        """Different words, as many as the period of each window, and the same again."""
        words = torch.rand(len(periods), len(self.corpus.names) - 1).argsort(1) + 1
        return words.gather(1, torch.arange(self.length + 1) % periods[:, None])


def train(
    model: Reader, data: Windows, steps: int, done: Any, looks: int = 20, rate: float = 8e-3
) -> list[dict[str, Any]]:
    """What was measured of the model as it learned, at so many looks."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda i: min(1.0, (i + 1) / 50) * min(1.0, 2.5 * (1 - i / steps) + 0.05)
    )
    every, history = max(1, steps // looks), []
    for i in range(steps):
        if i % every == 0:
            history.append({"step": i} | measure(model, data) | scores(model, data))
        ids = data.draw()
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        rates.step()
        done()
    history.append({"step": steps} | measure(model, data) | scores(model, data))
    return history


@torch.no_grad()
def measure(model: Reader, data: Windows) -> dict[str, float]:
    """Loss and accuracy on text that was not learned from, and on random words said again."""
    text, again = data.held_text, data.twice
    of_text, of_again = model(text[:, :-1]), model(again[:, :-1])[:, data.half :]
    right, right_again = text[:, 1:], again[:, 1:][:, data.half :]
    return {
        "text_loss": float(cross_entropy(of_text.mT, right)),
        "text_accuracy": float((of_text.argmax(-1) == right).float().mean()),
        "again_loss": float(cross_entropy(of_again.mT, right_again)),
        "again_accuracy": float((of_again.argmax(-1) == right_again).float().mean()),
    }


@torch.no_grad()
def scores(model: Reader, data: Windows) -> dict[str, list[list[float]]]:
    """How much each head, by layer, looks at the token before and at what followed last time."""
    with regard.watch(model, keep="traces") as seen:
        model(data.twice[:, :-1])
    weights = [layer.trace.weights() for layer in seen.values()]
    back = 1 - data.half
    return {
        "previous": [w.diagonal(-1, 2, 3)[..., 1:].mean((0, 2)).tolist() for w in weights],
        "induction": [w.diagonal(back, 2, 3)[..., 1:].mean((0, 2)).tolist() for w in weights],
    }


def silenced(heads: list[tuple[int, int]]) -> Replaced:
    """What these heads (layer, head) found is 0."""
    found: dict[str, list[int]] = {}
    for layer, head in heads:
        found.setdefault(f"layers.{layer}", []).append(head)
    return Replaced(found)


def silence_each(model: Reader, data: Windows, seed: int = 0) -> dict[str, Any]:
    """What is left with each head silent, with all of a kind, and as one after another falls."""
    model.eval()
    whole = measure(model, data)
    every = [(i, h) for i, layer in enumerate(model.layers) for h in range(layer.heads)]
    alone = {}
    for at in every:
        with interpret.intervene(model, silenced([at])):
            alone[at] = measure(model, data)
    found, kinds = scores(model, data), {}
    for what, layer in (("previous", 0), ("induction", len(model.layers) - 1)):
        kind = [(layer, h) for h, share in enumerate(found[what][layer]) if share > DOES]
        kinds[what] = {"heads": kind} | without(model, data, kind, layer, seed)
    order = sorted(every, key=lambda at: alone[at]["text_loss"])
    left = [whole]
    for count in range(1, len(order) + 1):
        with interpret.intervene(model, silenced(order[:count])):
            left.append(measure(model, data))
    return {
        "whole": whole,
        "kinds": kinds,
        "alone": [{"layer": i, "head": h} | alone[i, h] for i, h in every],
        "order": order,
        "left": left,
    }


def without(
    model: Reader, data: Windows, kind: list[tuple[int, int]], layer: int, seed: int
) -> dict[str, Any]:
    """The share of what is said again that is foreseen without all heads of a kind, and without as
    many others of their layer: with nothing in their place, and with their mean."""
    right = data.twice[:, 1:][:, data.half :]

    def foreseen(logits: Tensor) -> Tensor:
        return (logits[:, data.half :].argmax(-1) == right).double().mean(1)

    others = [(layer, h) for h in range(model.layers[layer].heads) if (layer, h) not in kind]
    count, source = min(len(kind), len(others)), torch.Generator().manual_seed(seed)
    drawn = [
        [others[i] for i in torch.randperm(len(others), generator=source)[:count].tolist()]
        for _ in range(DRAWS if count else 0)
    ]
    found: dict[str, Any] = {"matched": count == len(kind)}
    for by in ("zero", "mean"):
        if not kind:
            left = [float(foreseen(model(data.twice[:, :-1])).mean())]
        else:
            table = interpret.ablate(
                model, data.twice[:, :-1], foreseen, heads=[kind, *drawn], by=by
            )
            left = [row.changed for row in table]
        found[by] = {"foreseen": left[0], "others": left[1:]}
    return found


@torch.no_grad()
def picture_of(model: Reader, data: Windows) -> tuple[list[list[float]], list[str]]:
    """The strongest induction head over ten words said twice: its weights, and the words."""
    ids = data.said(torch.tensor([10]))[:, :20]
    last = torch.tensor(scores(model, data)["induction"][-1])
    with regard.watch(model, keep="traces") as seen:
        model(ids)
    trace = list(seen.values())[-1].trace
    weights = trace.weights(heads=[int(last.argmax())])[0, 0]
    return weights.tolist(), [data.corpus.names[i] for i in ids[0].tolist()]
