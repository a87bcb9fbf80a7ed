"""Takes the screenshots of these docs: the web views in a headless Chromium.

make images                          # or python docs/images/make.py, from the root; takes a minute
python docs/images/make.py FOLDER    # instead the pictures that regard lab --out FOLDER wrote
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright
from scenes import seen as scene

from regard import models
from regard.commands.named_subject import subject_of
from regard.seen import Seen
from regard.view import page
from regard.view.atlas import Atlas
from regard.view.subjects import known_badges
from regard.view.web import App

HERE = Path(__file__).parent
MODEL = "regard-small"
STORY = (
    "Once upon a time, there was a little girl named Lily. She had a red ball. Lily loved to play "
    "with her red ball in the park. One day, a big dog named Max came to the park. Max took the "
    "red ball and ran away. Lily was sad. She asked her mom for help. They found Max under a big "
    "tree. Max gave the red ball to Lily, and Lily and Max played with the red ball all day."
)
BOUND = 200_000
"""Bytes that a screenshot may take."""


@dataclass(frozen=True)
class Shot:
    """A view, by its address in a page, and how it is looked at."""

    view: str
    width: int = 1200
    height: int = 760
    theme: str = "light"
    fine: float = 1.5
    """Pixels of the picture for each of the screen."""
    point: tuple[float, float] | None = None
    """Where the mouse rests."""


def main() -> None:
    take_story()
    take_app()
    take_scene()


def take_story() -> None:
    """Views of a page: what a model sees in a story."""
    reader = models.load(MODEL)
    story = reader.run(STORY)
    story.model = MODEL
    words = [token.strip() for token in reader.read(STORY)]
    layer, head = repeating(story, words)
    here = f"map={layer}&head={head}"
    last = len(words) - 1 - words[::-1].index("red")
    views = {
        # The head that the card calls the plainest of its kind.
        "view_sentence": Shot("map=4&head=5", 1440, 820, fine=1),
        "view_map": Shot(
            f"view=map&{here}", point=place(story, layer, head, last, 1200 - 264, 760 - 47)
        ),
        "view_dark": Shot(f"view=map&{here}&scale=row&query=50&key=50&span=60", theme="dark"),
        "view_text": Shot(f"view=text&{here}&token={last}"),
        "view_overview": Shot(f"view=overview&{here}", height=600, fine=1),
        "view_heads": Shot("view=heads"),
        "view_phone": Shot(f"view=map&{here}&query=20&key=14&span=16", 390, 780),
    }
    with tempfile.TemporaryDirectory() as folder:
        atlas = Atlas.of(story).know(known_badges(reader))
        take(page(atlas, Path(folder) / "story.html").as_uri(), views)


def take_app() -> None:
    """Views of the app, which has the model at hand."""
    subject = subject_of(None, MODEL)
    views = {
        "view_app": Shot("map=4&head=5", 1440, 820, fine=1),
        "view_learn": Shot("view=learn&map=4&head=5&step=3", 1440, 820, fine=1),
    }
    with App(subject.atlas(), told=subject.told, reader=subject.reader) as app:
        take(app.url, views, wait=6000)


def take_scene() -> None:
    """A picture whose patches are tokens."""
    seen, patches = scene()
    sharp = int(seen["blocks.0.attention"].trace.weights()[0, :, 0].amax(-1).argmax())
    picture = {"view_picture": Shot(f"view=picture&map=0&head={sharp}", height=800)}
    with tempfile.TemporaryDirectory() as folder:
        take(page(seen, Path(folder) / "scene.html", tokens=patches).as_uri(), picture)


def place(
    seen: Seen, layer: int, head: int, query: int, width: int, height: int
) -> tuple[float, float]:
    """Where the strongest key but the first lies on the screen, when the whole map is seen."""
    weights = list(seen.values())[layer].trace.weights()[0, head]
    n, wide, high = len(weights), width - 120, height - 104
    zoom = min(wide / n, high / n)
    key = 1 + int(weights[query, 1:].argmax())
    left, top = 112 + (wide - n * zoom) / 2, 47 + 96 + (high - n * zoom) / 2
    return left + (key + 0.5) * zoom, top + (query + 0.5) * zoom


def repeating(seen: Seen, words: list[str]) -> tuple[int, int]:
    """The layer and head that most looks at what followed a word when it stood there before."""
    pairs = [
        (query, key + 1)
        for query, word in enumerate(words)
        for key in range(query - 1)
        if words[key] == word
    ]
    queries, keys = zip(*pairs, strict=True)
    shares = {
        (place, head): float(weights[list(queries), list(keys)].mean())
        for place, layer in enumerate(seen.values())
        for head, weights in enumerate(layer.trace.weights()[0])
    }
    return max(shares, key=lambda place: shares[place])


def take(address: str, shots: dict[str, Shot], wait: int = 1000) -> None:
    """Save views of a page, each under its name."""
    with sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "chrome")
        found = next(filter(None, map(shutil.which, names)), None)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for name, shot in shots.items():
            how: dict[str, Any] = {"color_scheme": shot.theme, "device_scale_factor": shot.fine}
            how["viewport"] = {"width": shot.width, "height": shot.height}
            tab = browser.new_context(**how).new_page()
            tab.goto(f"{address}#{shot.view}")
            tab.wait_for_timeout(wait)
            if shot.point:
                tab.mouse.move(*shot.point, steps=2)
            tab.wait_for_timeout(500)
            save(io.BytesIO(tab.screenshot()), HERE / f"{name}.png")
        browser.close()


def save(picture: Path | io.BytesIO, path: Path) -> None:
    """A picture, in 256 colours where all of them would take too much. (Those that cover most of
    its colours: the commonest would draw two lines alike.)"""
    shot = Image.open(picture).convert("RGB")
    shot.save(path, optimize=True)
    if path.stat().st_size > BOUND:
        few = shot.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    taken = path.stat().st_size
    print(f"{path.name}: {taken:,} bytes")
    if taken > BOUND:
        raise SystemExit(f"{path.name} takes more than {BOUND:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for drawn in sorted(Path(sys.argv[1]).glob("*.png")):
            save(drawn, HERE / f"lab_{drawn.name}")
    else:
        main()
