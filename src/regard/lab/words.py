"""What word vectors know, and how one attention layer moves a word to its sense.

CLAIM: Vectors trained to foresee a word's neighbours put words of a kind beside each other, and
relations into directions: king - man + woman is nearest to queen. One vector serves all senses of a
word; attention moves it towards the sense that its sentence has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from regard import masks
from regard.lab.experiments import About, Check, Progress, Result, Tell, seeded
from regard.lab.panels import Bars, Heat, Point, Points
from regard.lab.text import king_james
from regard.nn import StaticAttention

ABOUT = About(
    name="words",
    title="What word vectors know, and how attention moves them",
    claim=(
        "Vectors trained to foresee a word's neighbours put words of a kind beside each other, and "
        "some relations into directions: king − man + woman is nearest to queen. One vector serves "
        "all senses of a word; attention moves it towards the sense that its sentence has."
    ),
    method=(
        "Skip-gram with negative sampling (Mikolov and others, 2013) on eleven books of the King "
        "James Bible, some 230,000 words, in the public domain: each word learns to tell its "
        "neighbours in a window from words drawn at random. Frequent words are thinned out, and "
        "the mean of all vectors is taken from each. Most published vectors come from corpora "
        "thousands of times larger.",
        "An analogy a : b = c : ? is asked as the word nearest to b − a + c. It is usual to leave "
        "out a, b and c, of which b or c is most often nearest. We give the rank of the expected "
        "word with them left out; with them left in; and its rank among the neighbours of b alone "
        "or c alone, whichever is better, without any arithmetic. An analogy that is no better "
        "than that shows neighbours, not a direction. The most famous one is asked of vectors "
        "trained with several seeds.",
        "Then sentences of one ambiguous word each are read by one layer of attention without "
        "parameters (regard.nn.StaticAttention, scores divided by √d): to every word is added a "
        "mean of the other words, those most that it resembles. We ask whether the word has come "
        "nearer to words of its sense, none of which stand in the sentence, than to those of the "
        "other.",
    ),
    change=(
        "Train with another seed: which analogies hold, and which were luck?",
        "Make the window 2 or 10: which neighbours are of a kind, which of a topic?",
        "Divide scores by d instead of √d in moved(): does a word still find its company?",
        "Add analogies of your own. What does it take for a word to be learned at all?",
    ),
    full={"epochs": 20, "width": 100, "runs": 5},
)

RARE, NEGATIVES, BATCH, THIN, RATE = 5, 5, 4096, 1e-3, 1e-2
COUPLES = (("man", "woman"), ("king", "queen"), ("brother", "sister"), ("husband", "wife"))
KINDS = ("son", "daughter", "father", "mother", "silver", "gold", "brass", "sea", "river", "waters",
         "sword", "spear", "battle")  # fmt: skip
ANALOGIES = (
    ("man", "king", "woman", "queen"), ("man", "woman", "son", "daughter"),
    ("father", "mother", "son", "daughter"), ("father", "mother", "brother", "sister"),
    ("man", "woman", "husband", "wife"), ("he", "she", "his", "her"),
    ("man", "men", "woman", "women"), ("son", "sons", "daughter", "daughters"),
    ("day", "days", "year", "years"), ("hand", "hands", "foot", "feet"),
    ("eat", "bread", "drink", "wine"), ("egypt", "pharaoh", "babylon", "nebuchadnezzar"),
)  # fmt: skip
"""a is to b as c is to the last."""
KIN = (("son", "daughter"), ("father", "mother"), ("brother", "sister"), ("king", "queen"),
       ("silver", "gold"), ("sword", "spear"), ("sheep", "oxen"), ("morning", "evening"),
       ("bread", "wine"), ("river", "sea"))  # fmt: skip
"""Words of a kind."""
SENSES = {
    "bank": {"stood by the bank of the river": ("waters", "jordan", "sea"),
             "give my money into the bank": ("silver", "shekels", "pieces")},
    "well": {"drew water from the well for the camels": ("flocks", "drink", "sheep"),
             "do well that it may be good with thee": ("please", "pleased", "evil")},
    "bow": {"my bow and my sword and arrows": ("spear", "shield", "armour"),
            "bow down and serve them and worship": ("gods", "reverence", "worshipped")},
    "host": {"captain of the host of the army": ("battle", "horsemen", "joab"),
             "the sun and the moon and all the host of heaven": ("stars", "earth", "firmament")},
}  # fmt: skip
"""Sentences of a word, and words of the sense that each gives it."""


def run(
    *,
    seed: int = 0,
    width: int = 50,
    window: int = 5,
    epochs: int = 5,
    runs: int = 3,
    progress: Tell | None = None,
) -> Result:
    """Train vectors, ask them for kin and analogies, and let attention move some."""
    step = Progress(runs * epochs, progress)
    queens = []
    for i in reversed(range(runs)):
        with seeded(seed + i):
            vectors = train(width, window, epochs, lambda: step("reading"))
        queens.append(analogy(vectors, *ANALOGIES[0])["rank"])
    with seeded(seed):
        analogies = [analogy(vectors, *words) for words in ANALOGIES]
        senses = [one for word in SENSES for one in moved(vectors, word)]
        related, chance = closeness(vectors)
    numbers = {
        "vocabulary": len(vectors.names),
        "words": vectors.read,
        "kin": {"related": related, "chance": chance},
        "neighbours": {word: vectors.nearest(vectors[word], 6)[1:]
                       for word in ("king", "woman", "river", "silver")},
        "analogies": analogies,
        "queens": queens[::-1],
        "senses": senses,
        "plane": plane(vectors),
        "cosines": cosines(vectors),
    }  # fmt: skip
    settings = {"seed": seed, "width": width, "window": window, "epochs": epochs,
                "runs": runs}  # fmt: skip
    return Result(ABOUT, settings, _checks(numbers), _answer(numbers), numbers, _panels(numbers))


@dataclass(frozen=True)
class Vectors:
    """A vector of length 1 for each word."""

    names: list[str]
    rows: Float[Tensor, "v d"]
    read: int
    """How many words they were trained on."""

    @cached_property
    def place(self) -> dict[str, int]:
        """The row of each word."""
        return {name: i for i, name in enumerate(self.names)}

    def __getitem__(self, word: str) -> Float[Tensor, "d"]:
        return self.rows[self.place[word]]

    def nearest(self, to: Float[Tensor, "d"], count: int) -> list[str]:
        """The words nearest to a vector, nearest first."""
        return [self.names[i] for i in (self.rows @ to).topk(count).indices.tolist()]

    def rank(self, word: str, to: Float[Tensor, "d"], without: Sequence[str] = ()) -> int:
        """The place of a word among all, by how near they are: 1 is nearest."""
        near = self.rows @ to
        here = near[self.place[word]].item()
        near[[self.place[other] for other in without]] = -2.0
        return int((near > here).sum()) + 1


def train(width: int, window: int, epochs: int, done: Callable[[], None]) -> Vectors:
    """Skip-gram with negative sampling over the whole text, so many times."""
    words = re.findall(r"[a-z]+", king_james())
    counts = {w: n for w, n in Counter(words).most_common() if n >= RARE}
    names, often = list(counts), torch.tensor(list(counts.values())).float()
    place = {name: i for i, name in enumerate(names)}
    ids = torch.tensor([place[word] for word in words if word in place])
    share = often / often.sum()
    kept = ((THIN / share).sqrt() + THIN / share).clamp(max=1)
    noise = (often**0.75).cumsum(0) / (often**0.75).sum()
    inside = (0.1 * torch.randn(len(names), width)).requires_grad_()
    outside = torch.zeros(len(names), width, requires_grad=True)
    optimiser = torch.optim.Adam([inside, outside], lr=RATE)
    for epoch in range(epochs):
        optimiser.param_groups[0]["lr"] = RATE * (1 - 0.9 * epoch / epochs)
        thinned = ids[torch.rand(len(ids)) < kept[ids]]
        for centre, near in _pairs(thinned, window):
            drawn = torch.searchsorted(noise, torch.rand(len(centre), NEGATIVES))
            other = outside[drawn.clamp(max=len(names) - 1)]
            here = inside[centre]
            true, false = (here * outside[near]).sum(1), (other @ here[:, :, None]).squeeze(2)
            optimiser.zero_grad()
            (-(logsigmoid(true).sum() + logsigmoid(-false).sum()) / len(centre)).backward()
            optimiser.step()
        done()
    # What all words share says nothing about any of them.
    rows = inside.detach() - inside.detach().mean(0)
    return Vectors(names, normalize(rows, dim=1), len(ids))


def _pairs(ids: Int[Tensor, "n"], window: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of words and one neighbour each, in random order; near ones are drawn more often."""
    reach = torch.randint(1, window + 1, (len(ids),))
    found = []
    for apart in range(1, window + 1):
        before, after = ids[:-apart], ids[apart:]
        found.append(torch.stack([after, before])[:, reach[apart:] >= apart])
        found.append(torch.stack([before, after])[:, reach[:-apart] >= apart])
    pairs = torch.cat(found, 1)
    for some in torch.randperm(pairs.shape[1]).split(BATCH):
        yield pairs[0, some], pairs[1, some]


def analogy(vectors: Vectors, a: str, b: str, c: str, wanted: str) -> dict[str, Any]:
    """Where the wanted word stands by b - a + c, and by b or c alone."""
    given = (a, b, c)
    to = normalize(vectors[b] - vectors[a] + vectors[c], dim=0)
    near = [word for word in vectors.nearest(to, 8) if word not in given]
    return {
        "asked": f"{a} : {b} = {c} : {wanted}",
        "rank": vectors.rank(wanted, to, given),
        "rank_of_all": vectors.rank(wanted, to),
        "rank_alone": min(vectors.rank(wanted, vectors[word], given) for word in (b, c)),
        "nearest": near[:4],
    }


def closeness(vectors: Vectors) -> tuple[float, float]:
    """The mean cosine of words of a kind, and of words drawn at random."""
    related = [float(vectors[a] @ vectors[b]) for a, b in KIN]
    one, other = torch.randint(len(vectors.names), (2, 2000))
    return sum(related) / len(related), float(
        (vectors.rows[one] * vectors.rows[other]).sum(1).mean()
    )


def moved(vectors: Vectors, word: str) -> list[dict[str, Any]]:
    """How near a word is to words of each sense, before attention and in each sentence after."""
    sentences = SENSES[word]
    goals = torch.stack([
        normalize(sum(vectors[w] for w in sense), dim=0)  # type: ignore[arg-type]
        for sense in sentences.values()
    ])  # fmt: skip
    found = []
    for i, sentence in enumerate(sentences):
        # A word is as long as it is wide, as in a fresh layer.
        known = [w for w in sentence.split() if w in vectors.place]
        width = vectors.rows.shape[1]
        x = torch.stack([vectors[w] for w in known]) * width**0.5
        others = masks.ignore(torch.eye(len(known), dtype=torch.bool))
        company, seen = StaticAttention(width**-0.5)(x[None], mask=others, trace=True)
        at = known.index(word)
        before = goals @ vectors[word]
        after = goals @ normalize(x[at] + company[0, at], dim=0)
        found.append({
            "word": word, "sentence": sentence, "sense": list(sentences.values())[i],
            "before": [float(before[i]), float(before[1 - i])],
            "after": [float(after[i]), float(after[1 - i])],
            "weights": dict(zip(known, seen.weights(queries=[at])[0, 0].tolist(), strict=True)),
        })  # fmt: skip
    return found


def cosines(vectors: Vectors) -> list[list[float]]:
    """Between words of a few kinds."""
    rows = torch.stack([vectors[word] for word in KINDS])
    return (rows @ rows.T).tolist()


def plane(vectors: Vectors) -> dict[str, list[float]]:
    """Pairs of a man and a woman, on the plane in which they differ most."""
    words = [word for pair in COUPLES for word in pair]
    rows = torch.stack([vectors[word] for word in words])
    rows = rows - rows.mean(0)
    _, _, directions = torch.linalg.svd(rows, full_matrices=False)
    return dict(zip(words, (rows @ directions[:2].T).tolist(), strict=True))


def _lean(one: dict[str, Any], when: str) -> float:
    """How much nearer a word is to its own sense than to the other."""
    own, other = one[when]
    return float(own - other)


def _checks(numbers: dict[str, Any]) -> tuple[Check, ...]:
    kin, analogies, senses = (numbers[name] for name in ("kin", "analogies", "senses"))
    queens = numbers["queens"]
    nearer = sum(one["rank"] < one["rank_alone"] for one in analogies)
    right = sum(_lean(one, "after") > _lean(one, "before") for one in senses)
    return (
        Check(
            "words of a kind are beside each other",
            f"their cosine is {kin['related']:.2f}, that of any two "
            f"{round(kin['chance'], 2) + 0.0:.2f}",
            kin["related"] > kin["chance"] + 0.2,
        ),
        Check(
            "king − man + woman is nearest to queen",
            f"queen is number {', '.join(map(str, queens))} of {numbers['vocabulary']:,} in "
            f"{len(queens)} runs, the three words left out",
            max(queens) == 1,
        ),
        Check(
            "relations are directions: the sum finds more than the neighbours of its parts",
            f"in {nearer} of {len(analogies)} analogies; the median rank is "
            f"{median(one['rank'] for one in analogies):g} by the sum and "
            f"{median(one['rank_alone'] for one in analogies):g} by a part alone",
            nearer > len(analogies) / 2,
        ),
        Check(
            "attention moves a word towards the sense that its sentence has",
            f"in {right} of {len(senses)} sentences",
            right >= 0.75 * len(senses),
        ),
    )


def _answer(numbers: dict[str, Any]) -> str:
    kin, analogies, senses = (numbers[name] for name in ("kin", "analogies", "senses"))
    queen = analogies[0]
    bank = [one for one in senses if one["word"] == "bank"]
    sentences = "; ".join(
        f'in "{one["sentence"]}" it leans {_lean(one, "before"):+.2f} to {one["sense"][0]} and its '
        f"like before and {_lean(one, 'after'):+.2f} after"
        for one in bank
    )
    return (
        f"Of {numbers['words']:,} words, {numbers['vocabulary']:,} different ones. Words of a kind "
        f"have a cosine of {kin['related']:.2f}, any two {round(kin['chance'], 2) + 0.0:.2f}. "
        f"Nearest to king − man + woman are {', '.join(queen['nearest'])}; queen is number "
        f"{queen['rank']} with the three words left out, {queen['rank_of_all']} with them, and "
        f"{queen['rank_alone']} by king or woman alone. Over {len(numbers['queens'])} seeds she is "
        f"number {', '.join(map(str, numbers['queens']))}"
        + (": whether she is first is luck. " if len(set(numbers["queens"])) > 1 else ". ")
        + "Of the analogies asked "
        f"{sum(one['rank'] < one['rank_alone'] for one in analogies)} of {len(analogies)} gain by "
        f"the sum. Bank stands seven times in the text; {sentences}."
    )


def _panels(numbers: dict[str, Any]) -> tuple[Points | Bars | Heat, ...]:
    places, analogies, senses = (numbers[name] for name in ("plane", "analogies", "senses"))
    alone, in_sentence = [one for one in senses if one["word"] == "bank"], "in a sentence"
    start = (alone[0]["before"][1], alone[0]["before"][0])
    drawn = [Point(him, places[him], "he") for him, _ in COUPLES]
    drawn += [Point(her, places[her], "she", start=places[him]) for him, her in COUPLES]
    return (
        Heat(
            "Words of a kind", "Cosines. Kinds are blocks along the diagonal.",
            numbers["cosines"], KINDS, KINDS, "cosine", signed=True,
        ),
        Points(
            "Men and women", "If a relation were a direction, all arrows would be parallel.",
            "first direction", "second direction", drawn,
        ),
        Bars(
            "Is the expected word of an analogy found?",
            "1 over its rank: 1 is first, 0.5 second. Beside it, by one of the words alone.",
            "1 / rank", [one["asked"].rpartition(": ")[2] for one in analogies],
            {"by the sum": [1 / one["rank"] for one in analogies],
             "by one word": [1 / one["rank_alone"] for one in analogies]},
        ),
        Points(
            "Attention moves bank",
            "Cosine to words of each sense. The arrows begin where the vector of bank lies alone.",
            "to " + ", ".join(alone[1]["sense"]), "to " + ", ".join(alone[0]["sense"]),
            [Point("bank", start, "alone"),
             *(Point(f"sense of {one['sense'][0]}", (one["after"][1 - i], one["after"][i]),
                     in_sentence, start) for i, one in enumerate(alone))],
        ),
        Bars(
            "How far a word leans to its sense",
            "Cosine to words of that sense, less that to words of the other.",
            "lean", [f"{one['word']}: {one['sense'][0]}" for one in senses],
            {"alone": [_lean(one, "before") for one in senses],
             "in a sentence": [_lean(one, "after") for one in senses]},
        ),
    )  # fmt: skip
