"""Measure which heads do what, and write it on the card.

    python -m models.train.heads src/regard/models/embedded/regard-small

`badges` has a word for every head, as `regard.interpret.heads` gives it.

A causal model reads stories told on a CPU (its own, where these are not prepared), and random
tokens said twice; `heads` and `scores` have three of the scores of `regard.interpret.heads`:
- previous: the mean weight of the token just before.
- induction: where random tokens are said again, the mean weight of what followed the first time.
- first: the mean weight of the mark at the front.

A translator reads and writes held-out verses, where these are prepared:
- alignment: where the token that a row writes stands in the source once, its mean weight.
- end: the mean weight of the mark at the end of the source.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

import regard
from models.train.corpus import DATA
from models.train.training import device_of
from models.train.translate import Pairs
from regard import interpret
from regard.interpret import HeadScores
from regard.lab.material.text import king_james
from regard.models import OwnReader, OwnTranslator, load
from regard.models.tokenizer import MARK

Scores = dict[str, list[list[float]]]
"""For each thing that heads do, a number for each layer and head."""


def causal_scores(found: HeadScores) -> Scores:
    """Three scores of a causal model's heads, on texts and on repeated random tokens."""
    names = {"previous": "previous", "first": "first", "induction": "probe induction"}
    return rounded({name: torch.tensor(found.grid(score)) for name, score in names.items()})


def badges(found: HeadScores) -> dict[str, list[str]]:
    """By the path of a layer, a word for each head."""
    return {path: list(row) for path, row in zip(found.paths, found.badges(), strict=True)}


def stories(reader: OwnReader, count: int = 12, tokens: int = 180) -> list[str]:
    """What the model tells by itself."""
    begins = ("Once upon a time", "One day,", "Tom and Anna")
    return [
        (start := begins[i % len(begins)]) + reader.generate(start, tokens, seed=i)
        for i in range(count)
    ]


def verses(reader: OwnTranslator, count: int = 24) -> list[tuple[str, str]]:
    """Verses of the King James Bible, which a translator is to write as they are."""
    every = king_james().splitlines()
    chosen = [shortened(reader, verse) for verse in every[:: len(every) // count][:count]]
    return [(verse, verse) for verse in chosen]


@torch.no_grad()
def repeat_losses(reader: OwnReader, seed: int = 0) -> dict[str, float]:
    """The loss a token on random tokens, said for the first time and again."""
    model = reader.model
    half = (min(model.config.longest, 257) - 1) // 2
    ids, period = repeated(model.config.vocabulary, half, seed)
    ids = ids.to(device(model))
    losses = cross_entropy(model(ids[:, :-1]).transpose(1, 2).float(), ids[:, 1:], reduction="none")
    first, again = losses[:, :period].mean(), losses[:, period + 1 :].mean()
    return {"first time": round(float(first), 3), "again": round(float(again), 3)}


def repeated(vocabulary: int, period: int, seed: int) -> tuple[Tensor, int]:
    """[8, 1 + 2·period] ids: a mark, random tokens, and the same again."""
    generator = torch.Generator().manual_seed(seed)
    said = torch.stack([torch.randperm(vocabulary - 1, generator=generator)[:period] + 1
                        for _ in range(8)])  # fmt: skip
    return torch.cat([torch.full((8, 1), MARK), said, said], 1), period


@torch.no_grad()
def translator_scores(reader: OwnTranslator, pairs: Pairs, count: int = 100) -> Scores:
    """What the heads that look at the source do."""
    chosen = pairs.pairs[:: max(1, len(pairs.pairs) // count)]
    where, words, rows = device(reader.model), 0, 0
    aligned = end = torch.zeros((), device=where)
    for source, target in chosen:
        ids, written = source[None].to(where), target[None].to(where)
        with regard.watch(reader.model, layers=["decoder.*.memory"], keep="traces") as seen:
            reader.model(ids, written[:, :-1])
        weights = torch.stack([layer.trace.weights()[0] for layer in seen.values()])
        # [rows, keys]: the written token is this one of the source, and no other.
        same = (written[0, 1:, None] == ids[0]) & (written[0, 1:, None] != MARK)
        same &= same.sum(1, keepdim=True) == 1
        words += int(same.sum())
        aligned = aligned + (weights * same).sum((2, 3))
        end, rows = end + weights[..., -1].sum(2), rows + weights.shape[2]
    return rounded({"alignment": aligned / max(1, words), "end": end / max(1, rows)})


def rounded(scores: dict[str, Tensor]) -> Scores:
    return {name: [[round(v, 3) for v in row] for row in s.tolist()] for name, s in scores.items()}


def strongest(scores: Scores, count: int = 4) -> dict[str, list[dict[str, Any]]]:
    """The heads that do each thing most."""
    found = {}
    for name, table in scores.items():
        flat = [(v, i, j) for i, row in enumerate(table) for j, v in enumerate(row)]
        best = sorted(flat, key=lambda at: -at[0])[:count]
        found[name] = [{"layer": i, "head": j, "score": v} for v, i, j in best]
    return found


def device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def measured(folder: Path, where: str) -> dict[str, Any]:
    """The measured heads of the model in a folder."""
    reader = load(str(folder), device=where)
    if isinstance(reader, OwnTranslator):
        words = {"badges": badges(interpret.heads(reader, verses(reader)))}
        held = DATA / "king-james.safetensors"
        if not held.exists():
            return words
        longest = reader.model.config.longest
        pairs = Pairs(load_file(held), "held", longest, torch.device("cpu"))
        scores = translator_scores(reader, pairs)
        return {"heads": strongest(scores), "scores": scores} | words
    assert isinstance(reader, OwnReader)
    told = DATA / "told.json"
    texts = json.loads(told.read_text())[:20] if told.exists() else stories(reader)
    found = interpret.heads(reader, [shortened(reader, text) for text in texts])
    scores = causal_scores(found)
    repeats = repeat_losses(reader)
    return {
        "heads": strongest(scores),
        "badges": badges(found),
        "repeated tokens": repeats,
        "scores": scores,
    }


def shortened(reader: OwnReader, text: str) -> str:
    """As much of a text as the model can read."""
    # A translator's text has a mark at both ends.
    while len(reader.encode(text)) + 2 > reader.model.config.longest:
        text = text[: len(text) * 9 // 10]
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--device")
    given = parser.parse_args(arguments)
    for folder in given.folders:
        found = measured(folder, str(device_of(given)))
        path = folder / "card.json"
        card = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(card | found, indent=1, ensure_ascii=False) + "\n")
        print(f"{folder.name}: {found.get('repeated tokens', '')}")
        for path, words in found["badges"].items():
            print(f"  {path:<22} {' '.join(word or '·' for word in words)}")
        for name, heads in found.get("heads", {}).items():
            shown = ", ".join(f"layer {h['layer']} head {h['head']} {h['score']}" for h in heads)
            print(f"  {name:<10} {shown}")


if __name__ == "__main__":
    main()
