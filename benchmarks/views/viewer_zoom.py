"""Zooming at 16k tokens in the app: how long frames take, and how long tiles are waited for.

PYTHONPATH=src python -m benchmarks.views.viewer_zoom [--tokens N] [--turns N] [--quick]

A real wheel turns over a map in Chromium, in and out at places that are drawn. Measured alone, then
beside one program for each core that only computes, then with the badges of all heads asked for as
well. Of frames those count before which the wheel was heard; of tiles, from the request to its
bytes. A rest is from the last turn to the first frame with every tile in view.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.measurement import RESULTS, write
from benchmarks.views.viewer import browser, seen
from regard.view import App

HEADS = 8
WATCH = """() => {
    const canvas = document.querySelector('canvas.map')
    let heard = false
    window.drawn = []
    canvas.addEventListener('wheel', () => { heard = true }, {capture: true, passive: true})
    let before = performance.now()
    const frame = now => {
        if (heard) window.drawn.push(now - before)
        heard = false
        before = now
        requestAnimationFrame(frame)
    }
    requestAnimationFrame(frame)
    window.tiles = []
    new PerformanceObserver(list => {
        for (const {name, duration} of list.getEntries())
            if (name.includes('/tile?')) window.tiles.push([name.includes('exact'), duration])
    }).observe({type: 'resource'})
}"""
REST = """() => new Promise(done => {
    const canvas = document.querySelector('canvas.map')
    const start = performance.now()
    const look = () => {
        if (canvas.dataset.ready === 'yes') done(performance.now() - start)
        else requestAnimationFrame(look)
    }
    requestAnimationFrame(look)
})"""
Row = dict[str, Any]


def spin() -> None:
    """Keep a core busy."""
    while True:
        sum(range(10_000))


@contextmanager
def neighbours(many: int) -> Iterator[None]:
    """Programs that only compute."""
    running = [multiprocessing.Process(target=spin, daemon=True) for _ in range(many)]
    for each in running:
        each.start()
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.join()


@contextmanager
def badges(app: App, wanted: bool) -> Iterator[None]:
    """Somebody waits for what all heads do, which takes longer than this does."""

    def ask() -> None:
        asked = urllib.request.Request(f"{app.room}badges?map=0", headers={"Cookie": app.cookie})
        with urllib.request.urlopen(asked) as answer:
            answer.read()

    if wanted:
        threading.Thread(target=ask, daemon=True).start()
    yield


def zoomed(what: str, app: App, turns: int) -> tuple[Row, Row]:
    """In and out, at places that are drawn; what frames and tiles took."""
    drawn = random.Random(0)
    rests = []
    with browser() as tab:
        tab.set_viewport_size({"width": 1440, "height": 900})
        tab.goto(f"{app.url}#view=map")
        tab.wait_for_selector("canvas.map[data-ready=yes]", timeout=120_000)
        tab.evaluate(WATCH)
        box = tab.locator("canvas.map").bounding_box()
        for _ in range(turns):
            # Below the diagonal, where there is something to see.
            down = drawn.uniform(0.3, 0.95)
            right = drawn.uniform(0.05, 0.9) * down
            left, top = box["x"] + 112, box["y"] + 96
            side = box["height"] - 104
            middle = left + (box["width"] - 120 - side) / 2
            tab.mouse.move(middle + side * right, top + side * down)
            # Out again as far as in, and between them a rest at any level.
            steps = drawn.randrange(8, 40)
            for way in (-60, 60):
                for _ in range(steps):
                    tab.mouse.wheel(0, way)
                    tab.wait_for_timeout(8)
                if way < 0:
                    rests.append(tab.evaluate(REST))
        frames = sorted(tab.evaluate("window.drawn"))
        tiles = sorted(took for exact, took in tab.evaluate("window.tiles") if not exact)
    frame = {
        "beside it": what,
        "frames": len(frames),
        "median ms": round(median(frames), 1),
        "p95 ms": round(at(frames, 0.95), 1),
        "most ms": round(frames[-1], 1),
        "past 50 ms": sum(each > 50 for each in frames),
    }
    tile = {
        "beside it": what,
        "tiles": len(tiles),
        "median s": round(median(tiles) / 1e3, 3),
        "p95 s": round(at(tiles, 0.95) / 1e3, 3),
        "most s": round(tiles[-1] / 1e3, 3),
        "rest, median s": round(median(rests) / 1e3, 3),
        "rest, most s": round(max(rests) / 1e3, 3),
    }
    return frame, tile


def at(ordered: list[float], share: float) -> float:
    return ordered[int(share * len(ordered))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="alone only, and not kept")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    what = seen(options.tokens, HEADS)
    words = [f" word{i % 977}" for i in range(options.tokens)]
    frames, tiles = [], []
    for name, many, asked in (
        ("nothing", 0, False),
        (f"{cores} busy programs", cores, False),
        (f"{cores} busy programs and badges", cores, True),
    )[: 1 if options.quick else 3]:
        with App(what, tokens=words) as app, neighbours(many), badges(app, asked):
            frame, tile = zoomed(name, app, options.turns)
        frames.append(frame)
        tiles.append(tile)
        print(frame, tile, flush=True)
    more = {
        "command": "python -m benchmarks.views.viewer_zoom",
        "load of the machine": f"{load:.1f} before, on {cores} cores",
        "map": f"one layer of {HEADS} heads over {options.tokens:,} tokens, causal, float32",
    }
    tables = {"Frames while the wheel turns": frames, "Tiles that were asked for": tiles}
    write("viewer_zoom", tables, more, None if options.quick else RESULTS)


if __name__ == "__main__":
    main()
