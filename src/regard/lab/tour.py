"""The textbook's own examples, one after the other.

CLAIM: What textbooks print of attention comes out: the weights of three words, a word that moves to
the sense of its neighbour, heads of 64, a triangle of weights, costs that grow with the square, and
why scores are divided by √d.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

import regard
from regard import cost, interpret, masks, models, nn, scores
from regard.lab.apparatus.experiments import About, Progress, Result, Tell, seeded
from regard.lab.reports.tour import answer, checks, panels

ABOUT = About(
    name="tour",
    title="Through a textbook's examples, in order",
    claim=(
        "What textbooks print of attention comes out: the weights of “I love Paris”, scores 4, 8 "
        "and 8 of a word with its neighbours and itself, “apple” and “bank” that move to the sense "
        "beside them, heads 64 wide, a causal triangle, a cost that grows with the square of the "
        "length, and softmax that saturates where scores are not divided by √d. In a trained model "
        "a head looks from “it” at “animal”."
    ),
    method=(
        "A query says what a word looks for, a key what it can be found by, a value what it gives. "
        "The query of a word is compared with the key of every word: their dot product is the "
        "score. Scores are divided by √d, softmax turns them into weights that add up to 1, and "
        "the values are added up by these weights. All steps are taken with numbers small enough "
        "to check by hand.",
        "Static attention has no queries and keys of its own: words are compared by their vectors "
        "as they are. It shows what mixing does, and what it cannot do: scores are symmetric, so "
        "“apple” looks at “phone” as much as “phone” would at “apple”.",
        "The trained model is regard-small, which comes with this package. Its heads are asked how "
        "much they give from one word to another, and how much they give at that distance in "
        "general: a head that always looks so far back knows nothing of the words.",
    ),
    change=(
        "Make the query of “Paris” [1, 0, 0, 1]: which word does it look at now?",
        "Give “eat” the vector [0, 4], as “phone” has: what becomes of “apple”?",
        "In “because it was too wide”, it is the street. Do the same heads look there?",
        "Divide by d instead of √d: at which width is softmax as good as uniform?",
    ),
    full={"widths": (16, 64, 256, 1024, 4096), "samples": 512},
)

WORDS = ("I", "love", "Paris")
QUERY = (1.0, 0.0, 1.0, 0.0)
KEYS = ((1.0, 0.0, 0.0, 1.0), (0.0, 1.0, 1.0, 0.0), (1.0, 0.0, 1.0, 0.0))
SENSES = {
    "apple": {"phone": ((1.0, 1.0), (0.0, 4.0)), "eat": ((1.0, 1.0), (4.0, 0.0))},
    "bank": {"money": ((1.0, 1.0), (1.0, 5.0)), "river": ((1.0, 1.0), (5.0, 1.0))},
}
"""A word of two senses at [2, 2], beside a word that says nothing and one that decides."""
UNDECIDED = (2.0, 2.0)
LENGTHS = (128, 1024, 8192)
WIDTH, HEADS = 512, 8
SENTENCES = (
    ("The animal didn't cross the street because it was too tired.", "it", "animal"),
    ("Goku is the hero of the story because he never gives up.", "he", "Goku"),
)


def run(
    *,
    seed: int = 0,
    widths: Sequence[int] = (16, 64, 256, 1024),
    samples: int = 64,
    progress: Tell | None = None,
) -> Result:
    """Every example once."""
    step = Progress(7, progress)
    numbers: dict[str, Any] = {}
    for name, example in (
        ("paris", paris),
        ("static", static),
        ("senses", senses),
        ("heads", heads),
        ("causal", causal),
        ("cost", costs),
    ):
        numbers[name] = example()
        step(name)
    with seeded(seed):
        numbers["scaling"] = saturation(widths, samples)
    numbers["links"] = links()
    step("reading")
    settings = {"seed": seed, "widths": list(widths), "samples": samples}
    return Result(ABOUT, settings, checks(numbers), answer(numbers), numbers, panels(numbers))


def paris() -> dict[str, Any]:
    """One query, three keys, from scores to what is mixed."""
    q, k = torch.tensor([QUERY]), torch.tensor(KEYS)
    seen = regard.trace(q, k, k)
    return {
        "words": list(WORDS),
        "products": (q @ k.T)[0].tolist(),
        "logits": seen.logits()[0].tolist(),
        "weights": seen.weights()[0].tolist(),
        "mixed": seen.out[0].tolist(),
    }


def static() -> dict[str, Any]:
    """“buy apple phone”, compared by their own vectors."""
    x = torch.tensor([[(1.0, 1.0), UNDECIDED, (0.0, 4.0)]])
    out, seen = nn.StaticAttention()(x, trace=True)
    return {
        "words": ["buy", "apple", "phone"],
        "logits": seen.logits()[0].tolist(),
        "weights": seen.weights()[0].tolist(),
        "mixed": out[0].tolist(),
    }


def senses() -> dict[str, dict[str, list[float]]]:
    """Where a word of two senses goes beside each of two words."""
    moved: dict[str, dict[str, list[float]]] = {}
    for word, contexts in SENSES.items():
        for context, (plain, deciding) in contexts.items():
            x = torch.tensor([[plain, UNDECIDED, deciding]])
            moved.setdefault(word, {})[context] = nn.StaticAttention()(x)[0, 1].tolist()
    return moved


def heads() -> dict[str, Any]:
    """A layer of eight heads: what it projects, and how wide each head is."""
    layer = nn.MultiHeadAttention(WIDTH, HEADS)
    with torch.no_grad():
        _, seen = layer(torch.zeros(1, 10, WIDTH), trace=True)
    return {
        "queries": list(seen.inputs.q.shape),
        "keys": list(seen.inputs.k.shape),
        "parameters": sum(p.numel() for p in layer.parameters()),
    }


def causal() -> dict[str, Any]:
    """Six words that are all alike: each spreads its weight over itself and what came before."""
    x = torch.zeros(1, 1, 6, 4)
    weights = regard.trace(x, x, x, mask=masks.causal()).weights()[0, 0]
    return {"weights": weights.tolist()}


def costs() -> list[dict[str, int]]:
    """What one layer of 512 takes, in multiplications and additions, and what n×n weights hold."""
    found = []
    for n in LENGTHS:
        x = torch.empty(1, HEADS, n, WIDTH // HEADS, device="meta")
        found.append(
            {
                "length": n,
                "pairs": cost.call(x, x, x).flops("dense"),
                # Queries, keys, values and the output; one multiplication and one addition each.
                "projections": 4 * 2 * n * WIDTH * WIDTH,
                "bytes of weights": 4 * HEADS * n * n,
            }
        )
    return found


@torch.no_grad()
def saturation(widths: Sequence[int], samples: int, keys: int = 64) -> dict[str, Any]:
    """How evenly softmax spreads, of the most it could, by what scores are divided by."""
    found: dict[str, Any] = {"widths": list(widths), "deviation": [], "entropy": {}}
    for d in widths:
        q, k = torch.randn(2, 1, samples, keys, d)
        found["deviation"].append(float((q @ k.mT).std()))
        for name, scale in (("undivided", 1.0), ("by √d", d**-0.5), ("by d", 1 / d)):
            seen = regard.trace(q[None], k[None], k[None], score=scores.dot(), scale=scale)
            share = float(seen.entropy.mean()) / math.log(keys)
            found["entropy"].setdefault(name, []).append(share)
    return found


def links() -> list[dict[str, Any]]:
    """Which head of a trained model goes from one word to another."""
    reader = models.load("regard-small", device="cpu")
    found = []
    for text, one, other in SENTENCES:
        rows = interpret.heads(reader, text, links=[(one, other)], probes=False, random=False).links
        best = rows[0]
        found.append(
            {
                "text": text, "from": one, "to": other, "layer": best.layer, "head": best.head,
                "share": best.share, "usual": best.usual, "uniform": best.uniform,
            }
        )  # fmt: skip
    return found
