"""What heads do, and what several of them are for.

CLAIM: Heads specialise. A model of two layers grows heads that look at the token before, and on top
of them heads that look for what followed the last time (induction); without either kind, what is
said again is no longer foreseen, while as many others are hardly missed. Eight heads predict better
than one at equal parameters.
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
    full={"steps": 4000, "vocabulary": 192},
)

DOES = 0.3
"""The share of its weight from which a head is said to do a thing."""
KINDS = ("previous", "induction")
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
                trained[_called(count)] = train(model, data, steps, lambda: step("training"))
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


def strongest(found: dict[str, Any], what: str, layer: int) -> tuple[int, float]:
    """The head of a layer that does a thing most, and how much."""
    table = found[what][layer]
    best = max(range(len(table)), key=table.__getitem__)
    return best, table[best]


def _called(heads: int) -> str:
    return "1 head" if heads == 1 else f"{heads} heads"


def _checks(numbers: dict[str, Any], several: str) -> tuple[Check, ...]:
    runs = numbers["seeds"]
    first, one, many = (
        [run["trained"][name][at] for run in runs]
        for name, at in ((several, 0), ("1 head", -1), (several, -1))
    )

    def best(found: list[dict[str, Any]], what: str, layer: int) -> list[float]:
        return [strongest(each, what, layer)[1] for each in found]

    previous, induction = best(many, "previous", 0), best(many, "induction", -1)
    whole = [each["again_accuracy"] for each in many]
    left = {
        (what, by): [run["silenced"]["kinds"][what][by]["foreseen"] for run in runs]
        for what in KINDS
        for by in ("zero", "mean")
    }
    others = [
        share
        for run in runs
        for what in KINDS
        for by in ("zero", "mean")
        for share in run["silenced"]["kinds"][what][by]["others"]
    ]
    gains = [o["text_loss"] - m["text_loss"] for o, m in zip(one, many, strict=True)]
    return (
        Check(
            "a head of the first layer comes to look at the token before",
            f"{_range(best(first, 'previous', 0))} of its weight at first, {_range(previous)} then",
            min(previous) > 0.5,
        ),
        Check(
            "a head of the last layer comes to look at what followed last time",
            f"{_range(best(first, 'induction', -1))} of its weight at first, "
            f"{_range(induction)} then",
            min(induction) > 0.5,
        ),
        Check(
            "with them, what is said again is foreseen",
            f"{_range([m['again_accuracy'] for m in first])} of it at first, {_range(whole)} then",
            min(whole) > 0.8,
        ),
        Check(
            "without the heads of either kind it is not",
            "; ".join(
                f"without the {what} kind {_range(left[what, 'zero'])}, at their mean "
                f"{_range(left[what, 'mean'])}"
                for what in KINDS
            ),
            max(max(shares) for shares in left.values()) < min(whole) / 2,
        ),
        Check(
            "without as many others of the same layer, or all others, it is",
            f"{_range(others)} of it, {sum(others) / len(others):.0%} in the mean of the draws"
            if others
            else "there are no others",
            bool(others) and sum(others) / len(others) > 0.75 * min(whole),
        ),
        Check(
            f"{several} predict text better than one at equal parameters",
            f"{_range([m['text_accuracy'] for m in many])} of words against "
            f"{_range([o['text_accuracy'] for o in one])}, with a loss lower by "
            f"{min(gains):.2f} to {max(gains):.2f}",
            min(gains) > 0.02,
        ),
    )


def _answer(numbers: dict[str, Any], several: str) -> str:
    runs = numbers["seeds"]
    one, many = ([run["trained"][name][-1] for run in runs] for name in ("1 head", several))
    silent, layers = [run["silenced"] for run in runs], len(many[0]["previous"])
    previous = [strongest(each, "previous", 0)[1] for each in many]
    induction = [strongest(each, "induction", -1)[1] for each in many]
    left = {
        (what, by): _range([each["kinds"][what][by]["foreseen"] for each in silent])
        for what in KINDS
        for by in ("zero", "mean")
    }
    counts = {
        what: _numbers([len(each["kinds"][what]["heads"]) for each in silent]) for what in KINDS
    }
    others = [
        share
        for each in silent
        for what in KINDS
        for by in ("zero", "mean")
        for share in each["kinds"][what][by]["others"]
    ]
    alone = [
        min(m["again_accuracy"] for m in each["alone"] if m["layer"] == layers - 1)
        for each in silent
    ]
    spare = [_spare(each["left"]) for each in silent]
    copies = [each["again_accuracy"] for each in one]
    return (
        f"With {len(runs)} {'seed' if len(runs) == 1 else 'seeds'}, ranges are over them: a head "
        f"of layer 1 came to put {_range(previous)} of its weight on the token before, a head of "
        f"layer {layers} {_range(induction)} on the word that followed last time. Random words "
        f"said a second time were foreseen {_range([m['again_accuracy'] for m in many])} of the "
        f"time. With what looks at the token before silent ({counts['previous']}) it was "
        f"{left['previous', 'zero']}, and {left['previous', 'mean']} if they gave their mean; "
        f"without what looks at what followed ({counts['induction']}) "
        f"{left['induction', 'zero']} and {left['induction', 'mean']}; "
        + (
            f"without as many others of the same layer, or all where they are fewer, "
            f"{_range(others)}, "
            f"{sum(others) / len(others):.0%} in the mean; "
            if others
            else ""
        )
        + f"with any one head of layer {layers} silent never less than {_range(alone)}, as others "
        f"of its kind stand in. Of {len(silent[0]['order'])} heads {_numbers(spare, heads=False)} "
        f"could be silenced before text lost 0.1 nats. At equal parameters "
        f"({numbers['parameters']:,}) {several} predict "
        f"{_range([m['text_accuracy'] for m in many], 1)} of the words of new text and one "
        f"{_range([m['text_accuracy'] for m in one], 1)}. With one head a layer {_range(copies)} "
        f"of what is said again was foreseen: "
        + ("copying does not need several." if min(copies) > 0.8 else "too little to copy.")
    )


def _spare(left: list[dict[str, float]]) -> int:
    """How many heads were silent before text lost 0.1 nats."""
    most = left[0]["text_loss"] + 0.1
    return sum(1 for _ in takewhile(lambda m: m["text_loss"] <= most, left)) - 1


def _range(shares: list[float], digits: int = 0) -> str:
    """The least and the largest of some shares, or the one they are."""
    low, high = (f"{100 * share:.{digits}f}" for share in (min(shares), max(shares)))
    return f"{low}%" if low == high else f"{low} to {high}%"


def _numbers(counts: list[int], *, heads: bool = True) -> str:
    low, high = min(counts), max(counts)
    said = str(low) if low == high else f"{low} to {high}"
    return (f"{said} head" if said == "1" else f"{said} heads") if heads else said


def _panels(numbers: dict[str, Any], several: str) -> tuple[Lines | Bars | Heat, ...]:
    shown = numbers["seeds"][0]
    trained, silent = shown["trained"], shown["silenced"]
    history, last = trained[several], trained[several][-1]
    steps, layers = [m["step"] for m in history], len(last["previous"])
    p, i = strongest(last, "previous", 0)[0], strongest(last, "induction", -1)[0]
    by_layer = [[m for m in silent["alone"] if m["layer"] == at] for at in range(layers)]
    whole, words = silent["whole"]["again_accuracy"], shown["shown"]["words"]
    columns = [str(h + 1) for h in range(len(by_layer[0]))]
    kinds = silent["kinds"]
    left = {
        by: [kinds[what][name]["foreseen"] for what in KINDS]
        for by, name in (("nothing instead", "zero"), ("their mean instead", "mean"))
    }
    others = [kinds[what]["zero"]["others"] for what in KINDS]
    left["as many others"] = [sum(some) / len(some) if some else 0.0 for some in others]
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
            shown["shown"]["weights"], words, words, "weight", y="reads", x="looks at",
        ),
        Bars(
            "What is foreseen without a kind of heads",
            "All heads of a kind silent, and as many others of the same layer (mean of the draws).",
            "foreseen", ["previous", "induction"], left, percent=True,
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
