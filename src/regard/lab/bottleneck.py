"""What attention was invented for: the claim is stated in ABOUT, and run() tests it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from statistics import mean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard.errors import RegardError
from regard.lab.apparatus.experiments import About, Check, Progress, Result, Tell, seeded
from regard.lab.apparatus.panels import HeatMap, Line, Lines, Panel
from regard.lab.material.sayings import END, START, Book, Saying, misses
from regard.lab.models.translators import Translator, attends, translator

ABOUT = About(
    name="bottleneck",
    title="What attention was invented for",
    claim=(
        "A recurrent network that reads a sequence into one vector and writes another from it "
        "forgets: the longer the sequence, the less comes out right, and the less the first word "
        "reaches the last output. Attention lets the writer look at every word again, and learns "
        "by itself which words belong together."
    ),
    method=(
        "An encoder reads, a decoder writes. With a vanilla RNN, an LSTM or a GRU the decoder "
        "begins with the last state of the encoder, and that is all it gets. The same GRU then "
        "attends to all states of the encoder, by an additive score (Bahdanau) or a dot product "
        "(Luong); last comes a transformer of one block on either side. All are equally wide and "
        "are trained with the same steps, rate and data.",
        "They learn to write sixteen symbols in reverse and to copy them, at lengths mixed in "
        "training, and are judged at each symbol given the right ones before it. How far word 1 "
        "reaches is the gradient of the last output, the logit of the right symbol, with respect "
        "to the vector of the first input: before training, which shows the path alone, and after "
        "training to reverse, where that first symbol is exactly what the last output needs.",
        "Then they translate: 4,500 clauses of the World English Bible into the English of the "
        "King James Version, both in the public domain; nine in ten to learn from, the tenth to be "
        "judged by, written word by word. A sentence scores 1 less the share of words to put in, "
        "take out or change. The maps show where each written word looks.",
    ),
    change=(
        "Widen the vector (width=128): does a larger bottleneck help, and for how long?",
        "Train longer with --full, which also gives the RNN and the LSTM attention.",
        "Feed the encoder backwards: the first words are then nearest to the first outputs. Which "
        "of the models does that help?",
        "Test at twice the length of training: which of these learned a rule, and which a table?",
    ),
    full={
        "steps": 2000,
        "translating": 1500,
        "lengths": (2, 4, 8, 12, 16, 20, 24),
        "models": (
            "rnn", "lstm", "gru", "rnn + additive", "lstm + additive", "gru + additive",
            "rnn + dot", "lstm + dot", "gru + dot", "transformer",
        ),
    },
    takes="four to five minutes of one core",
)  # fmt: skip

SYMBOLS, BATCH, RATE = 16, 64, 5e-3
GROUPS = {"3–5": range(3, 6), "6–8": range(6, 9), "9–12": range(9, 13)}
"""Words of a sentence."""
MODELS = ("rnn", "lstm", "gru", "gru + additive", "gru + dot", "transformer")

Batch = tuple[Int[Tensor, "b n"], Int[Tensor, "b m"]]
Turn = Callable[[Tensor], Tensor]
TASKS: dict[str, Turn] = {"reverse": lambda x: x.flip(1), "copy": lambda x: x}


def run(
    *,
    seed: int = 0,
    models: Sequence[str] = MODELS,
    lengths: Sequence[int] = (2, 4, 6, 8, 10, 12, 14),
    width: int = 64,
    steps: int = 600,
    sayings: int = 4500,
    translating: int = 450,
    progress: Tell | None = None,
) -> Result:
    """Train each model to reverse, to copy and to translate.

    >>> result = run(models=("gru", "gru + dot"), lengths=(2, 4), steps=1, sayings=100,
    ...              translating=1, width=8)
    >>> sorted(result.numbers["models"]), result.supported    # one step teaches nothing
    (['gru', 'gru + dot'], False)
    """
    if len({attends(name) for name in models}) < 2:
        raise RegardError(
            "models= are compared, some through one vector and some with attention",
            got=", ".join(models) or "none",
            accepted="at least one of each, such as gru and gru + dot",
        )
    step = Progress(len(models) * (len(TASKS) * steps + translating), progress)
    book = Book.read(sayings)
    found: dict[str, dict[str, Any]] = {}
    writers = {}
    for name in models:
        found[name] = {}
        for task, turn in TASKS.items():
            with seeded(seed):
                model = translator(name, SYMBOLS, SYMBOLS + 1, width)
                fresh = [reach(model, turn, n) for n in lengths]
                done = partial(step, f"{task}: {name}")
                train(model, symbols(turn, lengths), SYMBOLS, steps, done)
                found[name][task] = [correct(model, turn, n) for n in lengths]
            if task == "reverse":
                found[name] |= _looked(model, turn, lengths, attends(name)) | {"fresh": fresh}
        with seeded(seed):
            writers[name] = translator(name, len(book.sources), len(book.targets), width)
            done = partial(step, f"translating: {name}")
            train(writers[name], book.batches(BATCH), START, translating, done)
            found[name]["translation"] = translation(writers[name], book)
    attending = {name: writers[name] for name in models if attends(name)}
    numbers = {"lengths": list(lengths), "models": found, "sentence": example(attending, book)}
    settings = {"seed": seed, "models": list(models), "lengths": list(lengths), "width": width,
                "steps": steps, "sayings": sayings, "translating": translating}  # fmt: skip
    return Result(ABOUT, settings, _checks(numbers), _answer(numbers), numbers, _panels(numbers))


def symbols(turn: Turn, lengths: Sequence[int]) -> Iterator[Batch]:
    """Random sequences of one length at a time, and what is to be written; forever."""
    while True:
        n = int(torch.randint(lengths[0], lengths[-1] + 1, ()))
        x = torch.randint(SYMBOLS, (BATCH, n))
        yield x, turn(x)


def train(
    model: Translator, batches: Iterator[Batch], start: int, steps: int, done: Callable[[], None]
) -> None:
    """Learn to write, given the right words before; the rate rises, then falls."""
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps + 1)
    for _ in range(steps):
        source, right = next(batches)
        logits = model(model.source(source), shifted(right, start))
        loss = cross_entropy(logits.flatten(0, 1), right.flatten(), ignore_index=-1)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        done()


def shifted(right: Int[Tensor, "b m"], start: int) -> Int[Tensor, "b m"]:
    """The words before each place.

    >>> shifted(torch.tensor([[5, 6, 7]]), start=0)
    tensor([[0, 5, 6]])
    """
    first = torch.full_like(right[:, :1], start)
    return torch.cat([first, right[:, :-1]], 1).clamp(min=0)


@torch.no_grad()
def correct(model: Translator, turn: Turn, n: int, count: int = 256) -> float:
    """The share of symbols that are right, given the right ones before."""
    x = torch.randint(SYMBOLS, (count, n))
    right = turn(x)
    likeliest = model(model.source(x), shifted(right, SYMBOLS)).argmax(-1)
    return float((likeliest == right).float().mean())


def reach(model: Translator, turn: Turn, n: int, count: int = 128) -> dict[str, float]:
    """How much the first input moves the last output, and its share of what all inputs do."""
    x = torch.randint(SYMBOLS, (count, n))
    right = turn(x)
    source = model.source(x).detach().requires_grad_()
    last = model(source, shifted(right, SYMBOLS))[:, -1].gather(1, right[:, -1:])
    (gradient,) = torch.autograd.grad(last.sum(), source)
    size = gradient.norm(dim=-1)
    return {"first": float(size[:, 0].mean()), "share": float((size[:, 0] / size.sum(1)).mean())}


@torch.no_grad()
def alignment(
    model: Translator, x: Int[Tensor, "b n"], right: Int[Tensor, "b m"], start: int
) -> Float[Tensor, "b m n"]:
    """Where each written word looks, the mean of all heads."""
    weights = model.look(model.source(x), shifted(right, start)).weights()
    return weights if weights.ndim == 3 else weights.mean(1)


def translation(model: Translator, book: Book) -> dict[str, float]:
    """The score of held-out sentences, by the words they have."""
    scores = {}
    for group, lengths in GROUPS.items():
        wrong = of = 0
        for n in lengths:
            said = [pair for pair in book.held if len(pair[0]) == n]
            for words, (_, right) in zip(written(model, book, said), said, strict=True):
                wrong += misses(words, right)
                of += max(len(words), len(right))
        scores[group] = 1 - wrong / max(of, 1)
    return scores


def written(model: Translator, book: Book, said: Sequence[Saying]) -> list[list[str]]:
    """What a model makes of sentences of one length."""
    if not said:
        return []
    rows = model.write(book.encoded(said)[0], START, 14).tolist()
    ends = [row.index(END) if END in row else len(row) for row in rows]
    return [[book.targets[i] for i in row[:end]] for row, end in zip(rows, ends, strict=True)]


def example(models: dict[str, Translator], book: Book) -> dict[str, Any]:
    """The held-out sentence of most new words that most models get right, and where they look."""
    best: tuple[tuple[int, int], Saying] | None = None
    for n in range(5, 9):
        said = [pair for pair in book.held if len(pair[0]) == n]
        made = [written(model, book, said) for model in models.values()]
        for i, pair in enumerate(said):
            right = sum(words[i] == list(pair[1]) for words in made)
            rank = right, len(set(pair[1]) - set(pair[0]))
            best = max(best, (rank, pair)) if best else (rank, pair)
    assert best is not None
    x, y = book.encoded([best[1]])
    maps = {name: alignment(model, x, y, START)[0].tolist() for name, model in models.items()}
    return {"newer": best[1][0], "older": [*best[1][1], "(end)"], "weights": maps}


def _looked(
    model: Translator, turn: Turn, lengths: Sequence[int], attending: bool
) -> dict[str, Any]:
    """What training to reverse made of gradients, and of alignment."""
    with seeded(0):
        found: dict[str, Any] = {"trained": [reach(model, turn, n) for n in lengths]}
        if attending:
            x = torch.randint(SYMBOLS, (BATCH, lengths[-1]))
            weights = alignment(model, x, turn(x), SYMBOLS)
            off = weights.argmax(-1) - torch.arange(lengths[-1]).flip(0)
            found |= {"aligned": float((off.abs() <= 1).float().mean()), "map": weights[0].tolist()}
    return found


def _checks(numbers: dict[str, Any]) -> tuple[Check, ...]:
    found, longest = numbers["models"], numbers["lengths"][-1]
    squeezed, free = _split(found)
    ends = {name: mean(found[name][task][-1] for task in TASKS) for name in found}
    begins = {name: mean(found[name][task][0] for task in TASKS) for name in squeezed}
    reached = {name: found[name]["fresh"][-1]["first"] for name in found}
    shares = {name: found[name]["trained"][-1]["share"] for name in found}
    scores = {name: mean(found[name]["translation"].values()) for name in found}
    return (
        Check(
            "through one vector, less comes out right the longer the sequence",
            f"at length {longest} {_each(ends, squeezed)} of symbols",
            all(ends[name] < begins[name] - 0.25 for name in squeezed),
        ),
        Check(
            "with attention it stays right",
            f"at length {longest} {_each(ends, free)}",
            min(ends[name] for name in free) > max(ends[name] for name in squeezed) + 0.15,
        ),
        Check(
            "through one vector, word 1 hardly reaches the last output of a fresh model",
            "gradient " + ", ".join(f"{name} {reached[name]:.1g}" for name in found),
            max(reached[n] for n in squeezed) < 1e-2 * min(reached[n] for n in free),
        ),
        Check(
            "and after training it has less of a say than with attention",
            f"share of the gradient {_each(shares, list(found))}",
            max(shares[name] for name in squeezed) < min(shares[name] for name in free),
        ),
        Check(
            "attention translates better",
            f"score {_each(scores, list(found))}",
            min(scores[name] for name in free) > max(scores[name] for name in squeezed) + 0.1,
        ),
        Check(
            "alignment is learned by itself",
            "the strongest weight is on the symbol that is written, or beside it, in "
            + ", ".join(f"{found[name]['aligned']:.0%} ({name})" for name in free),
            all(found[name]["aligned"] > 0.6 for name in free),
        ),
    )


def _split(found: dict[str, Any]) -> tuple[list[str], list[str]]:
    return [n for n in found if not attends(n)], [n for n in found if attends(n)]


def _each(values: dict[str, float], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {values[name]:.0%}" for name in names)


def _answer(numbers: dict[str, Any]) -> str:
    found, longest = numbers["models"], numbers["lengths"][-1]
    squeezed, free = _split(found)

    def between(names: Sequence[str], task: str, at: Any) -> str:
        values = [found[name][task][at] for name in names]
        return f"{min(values):.0%} to {max(values):.0%}"

    parts = [
        f"{task} {between(squeezed, task, -1)} of symbols through one vector and "
        f"{between(free, task, -1)} with attention"
        for task in TASKS
    ]
    weakest, strongest = (
        pick(found[name]["fresh"][-1]["first"] for name in names)
        for pick, names in ((max, squeezed), (min, free))
    )
    return (
        f"At length {longest} the models {'; they '.join(parts)}. Before training, the gradient of "
        f"the last output with respect to word 1 is at most {weakest:.1g} through one vector, and "
        f"at least {strongest:.1g} with attention. Translating unseen sentences of 9 to 12 words "
        f"they score {between(squeezed, 'translation', '9–12')} and "
        f"{between(free, 'translation', '9–12')}."
    )


def _panels(numbers: dict[str, Any]) -> tuple[Panel, ...]:
    lengths, found, sentence = numbers["lengths"], numbers["models"], numbers["sentence"]
    _, free = _split(found)

    def curves(x: Sequence[float], of: Callable[[dict[str, Any]], Sequence[float]]) -> list[Line]:
        return [Line(name, x, of(model)) for name, model in found.items()]

    accuracies = [
        Lines(f"{task.capitalize()}: symbols that are right", caption, "length", "accuracy",
              curves(lengths, itemgetter(task)), percent=True)
        for task, caption in (
            ("reverse", "What went through one vector is lost with length."),
            ("copy", "Copying is harder for a network that must hold the first symbol longest."),
        )
    ]  # fmt: skip
    middles = [mean(group) for group in GROUPS.values()]
    alike = {name: found[name]["map"] for name in free[:1]}
    places = [str(i + 1) for i in range(lengths[-1])]
    return (
        *accuracies,
        Lines("Translation: score of unseen sentences", "1 less the share of wrong words.",
              "words of the sentence", "score",
              curves(middles, lambda m: list(m["translation"].values())), percent=True),
        Lines("How far word 1 reaches, before training",
              "The gradient of the last output: through one vector it fades with every step.",
              "length", "gradient", curves(lengths, lambda m: [r["first"] for r in m["fresh"]]),
              log_y=True),
        Lines("Word 1's share, after training to reverse",
              "The last output should depend on word 1 alone, 100%.",
              "length", "share of the gradient",
              curves(lengths, lambda m: [r["share"] for r in m["trained"]]), percent=True),
        *(HeatMap(f"Reverse: where {name} looks",
               "The first symbol written looks at the last one read, and so on, or right beside.",
               weights, places, places, "weight", y="written", x="read")
          for name, weights in alike.items()),
        *(HeatMap(f"Translation: where {name} looks", "Each row is a written word.",
               weights, sentence["older"], sentence["newer"], "weight", y="written", x="read")
          for name, weights in sentence["weights"].items()),
    )  # fmt: skip
