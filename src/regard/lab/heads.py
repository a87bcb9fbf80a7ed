"""What heads do, and what several of them are for.

CLAIM: Heads specialise. A model of two layers grows heads that look at the token before, and on top
of them heads that look for what followed the last time (induction); without either kind, what is
said again is no longer foreseen. Eight heads predict better than one at equal parameters.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import regard
from regard import interpret, masks
from regard.interpret.interventions import Replaced
from regard.lab.experiments import About, Check, Progress, Result, Tell, seeded
from regard.lab.panels import Bars, Heat, Line, Lines
from regard.lab.text import Corpus
from regard.nn import MultiHeadAttention, Rotary

ABOUT = About(
    name="heads",
    title="What heads do, and why there are several",
    claim=(
        "Heads specialise. A model of two layers grows heads that look at the token before, and on "
        "top of them heads that look for what followed the last time (induction heads); without "
        "either kind, the model no longer foresees what is said again. Eight heads predict better "
        "than one at equal parameters."
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
        "all of a kind, and one after another, those first that text misses least.",
        "One head as wide as the model has exactly as many parameters as eight of an eighth. It is "
        "trained on the same windows.",
    ),
    change=(
        "Take the repeated windows away (repeats=0): do induction heads still grow?",
        "Give the model one layer (layers=1): what is said again cannot be foreseen. Why?",
        "Try heads=2 and heads=16. At which number does text stop gaining?",
        "Replace Rotary() by None: does a causal mask alone say which token came before?",
    ),
    full={"steps": 4000, "vocabulary": 192},
)

DOES = 0.3
"""The share of its weight from which a head is said to do a thing."""


def run(
    *,
    seed: int = 0,
    width: int = 64,
    heads: int = 8,
    layers: int = 2,
    vocabulary: int = 96,
    length: int = 32,
    batch: int = 64,
    repeats: float = 0.5,
    steps: int = 1500,
    progress: Tell | None = None,
) -> Result:
    """Train with several heads and with one, look at every head as it grows, and silence each."""
    step = Progress(2 * steps, progress)
    trained, model = {}, None
    for count in (1, heads):
        with seeded(seed):
            data = Windows(Corpus.words(vocabulary), length, batch, repeats)
            model = Reader(vocabulary, width, count, layers)
            trained[_called(count)] = train(model, data, steps, lambda: step("training"))
    assert model is not None
    with seeded(seed + 1):
        silenced = silence_each(model, data)
        one, shown = picture_of(model, data)
    numbers = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": trained,
        "silenced": silenced,
        "shown": {"words": shown, "weights": one},
    }
    settings = {"seed": seed, "width": width, "heads": heads, "layers": layers,
                "vocabulary": vocabulary, "length": length, "batch": batch, "repeats": repeats,
                "steps": steps}  # fmt: skip
    several = _called(heads)
    checks = _checks(numbers, several)
    return Result(
        ABOUT, settings, checks, _answer(numbers, several), numbers, _panels(numbers, several)
    )


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
    model: Reader, data: Windows, steps: int, done: Any, looks: int = 20
) -> list[dict[str, Any]]:
    """What was measured of the model as it learned, at so many looks."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda i: min(1.0, (i + 1) / 50) * (1 - 0.9 * i / steps)
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


def silence_each(model: Reader, data: Windows) -> dict[str, Any]:
    """What is left with each head silent, with all of a kind, and as one after another falls."""
    whole = measure(model, data)
    every = [(i, h) for i, layer in enumerate(model.layers) for h in range(layer.heads)]
    alone = {}
    for at in every:
        with interpret.intervene(model, silenced([at])):
            alone[at] = measure(model, data)
    found, kinds = scores(model, data), {}
    for what, layer in (("previous", 0), ("induction", len(model.layers) - 1)):
        kind = [(layer, h) for h, share in enumerate(found[what][layer]) if share > DOES]
        with interpret.intervene(model, silenced(kind)):
            kinds[what] = {"heads": kind} | measure(model, data)
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


def strongest(found: dict[str, Any], what: str, layer: int) -> tuple[int, float]:
    """The head of a layer that does a thing most, and how much."""
    table = found[what][layer]
    best = max(range(len(table)), key=table.__getitem__)
    return best, table[best]


def _called(heads: int) -> str:
    return "1 head" if heads == 1 else f"{heads} heads"


def _checks(numbers: dict[str, Any], several: str) -> tuple[Check, ...]:
    one, many = (numbers["trained"][name][-1] for name in ("1 head", several))
    before = numbers["trained"][several][0]
    previous, induction = strongest(many, "previous", 0)[1], strongest(many, "induction", -1)[1]
    kinds, whole = numbers["silenced"]["kinds"], many["again_accuracy"]
    without = [kinds[what]["again_accuracy"] for what in ("previous", "induction")]
    return (
        Check(
            "a head of the first layer comes to look at the token before",
            f"{strongest(before, 'previous', 0)[1]:.0%} of its weight at first, "
            f"{previous:.0%} then",
            previous > 0.5,
        ),
        Check(
            "a head of the last layer comes to look at what followed last time",
            f"{strongest(before, 'induction', -1)[1]:.0%} of its weight at first, "
            f"{induction:.0%} then",
            induction > 0.5,
        ),
        Check(
            "with them, what is said again is foreseen",
            f"{before['again_accuracy']:.0%} of it at first, {whole:.0%} then",
            whole > 0.8,
        ),
        Check(
            "without the heads of either kind it is not",
            f"{without[0]:.0%} without the first kind, {without[1]:.0%} without the second",
            max(without) < whole / 2,
        ),
        Check(
            f"{several} predict text better than one at equal parameters",
            f"{many['text_accuracy']:.1%} of words against {one['text_accuracy']:.1%}, loss "
            f"{many['text_loss']:.2f} against {one['text_loss']:.2f}",
            many["text_loss"] < one["text_loss"] - 0.02,
        ),
    )


def _answer(numbers: dict[str, Any], several: str) -> str:
    one, many = (numbers["trained"][name][-1] for name in ("1 head", several))
    (p, previous), (i, induction) = strongest(many, "previous", 0), strongest(many, "induction", -1)
    silent, layers = numbers["silenced"], len(many["previous"])
    left, before, after = silent["left"], *(silent["kinds"][k] for k in ("previous", "induction"))
    alone = [m["again_accuracy"] for m in silent["alone"] if m["layer"] == layers - 1]
    most = left[0]["text_loss"] + 0.1
    spare = sum(1 for _ in takewhile(lambda m: m["text_loss"] <= most, left)) - 1
    return (
        f"Head {p + 1} of layer 1 came to put {previous:.0%} of its weight on the token before, "
        f"head {i + 1} of layer {layers} {induction:.0%} on the word that followed last time. "
        f"Random words said a second time were then foreseen {many['again_accuracy']:.0%} of the "
        f"time. With what looks at the token before silent ({_called(len(before['heads']))}) it "
        f"was {before['again_accuracy']:.0%}, without what looks at what followed "
        f"({_called(len(after['heads']))}) {after['again_accuracy']:.0%}; with any one head of "
        f"layer {layers} silent never less than {min(alone):.0%}, as others of its kind stand in. "
        f"Of {len(silent['order'])} heads {spare} could be silenced before text lost 0.1 nats. "
        f"At equal parameters ({numbers['parameters']:,}) {several} predict "
        f"{many['text_accuracy']:.1%} of the words of new text and one {one['text_accuracy']:.1%} "
        f"(loss {many['text_loss']:.2f} and {one['text_loss']:.2f}). With one head a layer "
        f"{one['again_accuracy']:.0%} of what is said again was foreseen: "
        + (
            "copying does not need several."
            if one["again_accuracy"] > 0.8
            else "too little to copy."
        )
    )


def _panels(numbers: dict[str, Any], several: str) -> tuple[Lines | Bars | Heat, ...]:
    trained, silent = numbers["trained"], numbers["silenced"]
    history, last = trained[several], trained[several][-1]
    steps, layers = [m["step"] for m in history], len(last["previous"])
    p, i = strongest(last, "previous", 0)[0], strongest(last, "induction", -1)[0]
    by_layer = [[m for m in silent["alone"] if m["layer"] == at] for at in range(layers)]
    whole, words = silent["whole"]["again_accuracy"], numbers["shown"]["words"]
    columns = [str(h + 1) for h in range(len(by_layer[0]))]
    return (
        Lines(
            f"Two heads grow ({several})",
            "The second needs the first. Once both are there, what is said again is foreseen.",
            "step", "share",
            [Line("previous", steps, [m["previous"][0][p] for m in history]),
             Line("induction", steps, [m["induction"][-1][i] for m in history]),
             Line("foreseen", steps, [m["again_accuracy"] for m in history], dashed=True)],
            percent=True,
        ),
        Lines(
            "Loss on new text", "The same parameters, cut into one head or several.",
            "step", "loss, nats a word",
            [Line(name, steps[1:], [m["text_loss"] for m in run[1:]])
             for name, run in trained.items()],
        ),
        Bars(
            "What is predicted",
            "Several heads help where there is more than one thing to look for.",
            "accuracy", ["new text", "said again"],
            {name: [run[-1]["text_accuracy"], run[-1]["again_accuracy"]]
             for name, run in trained.items()},
            percent=True,
        ),
        Heat(
            f"The induction head (layer {layers}, head {i + 1})",
            "Ten words said twice. The second time each looks at what followed the first time: a "
            "stripe nine places back.",
            numbers["shown"]["weights"], words, words, "weight", y="reads", x="looks at",
        ),
        Heat(
            "What each head's silence costs",
            "Share of what is said again that is no longer foreseen when one head is silent.",
            [[max(0.0, whole - m["again_accuracy"]) for m in row] for row in by_layer],
            [f"layer {at + 1}" for at in range(layers)], columns, "lost", x="head",
        ),
        Lines(
            "One head after another falls silent", "Those first that text misses least.",
            "heads silent", "share predicted",
            [Line("new text", range(len(silent["left"])),
                  [m["text_accuracy"] for m in silent["left"]]),
             Line("said again", range(len(silent["left"])),
                  [m["again_accuracy"] for m in silent["left"]])],
            percent=True,
        ),
    )  # fmt: skip
