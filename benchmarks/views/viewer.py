"""What the web views take: pages beside BertViz's and CircuitsVis', and the app on long texts.

PYTHONPATH=src python -m benchmarks.views.viewer [--out FOLDER] [--quick] [--peers PYTHON]

`--peers` is a Python that has torch, transformers, bertviz and circuitsvis: this one, if they are
installed beside regard. A page that is not there after a while is given up.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import regard
from benchmarks.measurement import RESULTS, write
from benchmarks.views.viewer_pages import HEADS, LAYERS
from regard import masks
from regard.seen import Seen
from regard.view import App
from regard.view.atlas import Atlas
from regard.view.atlas.tiles import decoded, levels, tile

WIDTH = 64
PAGES = Path(__file__).with_name("viewer_pages.py")
PATIENCE = {1024: 120, 2048: 35}
"""Seconds after which a peer's page of so many tokens is given up."""
Row = dict[str, Any]
Taken = tuple[float, float]


class Clock:
    """Seconds by the clock, and of the CPU for this process, which depend less on others."""

    def __init__(self) -> None:
        self.start = time.perf_counter(), time.process_time()

    def taken(self) -> Taken:
        return time.perf_counter() - self.start[0], time.process_time() - self.start[1]


def seen(n: int, heads: int = HEADS) -> Seen:
    """A causal layer whose heads look back, at copies and at a sink, as trained ones do."""
    torch.manual_seed(0)
    place = torch.arange(n)[:, None] / 500 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
    words = torch.randn(97, WIDTH)[torch.randint(97, (n,))]
    q, k = torch.randn(2, 1, heads, n, WIDTH).unbind()
    for head in range(heads):
        if head % 4 == 0:
            k[0, head] = torch.cat([place.cos(), place.sin()], -1) * (1 + head / 8)
            q[0, head] = k[0, head] + 0.3 * q[0, head]
        elif head % 4 == 1:
            q[0, head], k[0, head] = words * 0.7, words.roll(1, 0)
        elif head % 4 == 2:
            k[0, head, 0] = 2 * q[0, head].mean(0) + 1
            q[0, head] += 0.3
    found = Seen("structured heads")
    found.layer("layers.0.self_attn").take(regard.trace(q, k, q, mask=masks.causal()), 0, keep=True)
    return found


def check() -> str:
    """Whether tiles hold the exact weights, before they are measured."""
    of = Atlas.of(seen(600))[0]
    exact = of.traces[0].weights(heads=[1])[0, 0]
    found = decoded(tile(of, 1, 0, 1, 1)).mean
    torch.testing.assert_close(found, exact[256:512, 256:512], rtol=1e-3, atol=1e-6)
    return "tiles agree with exact weights"


def pages(cases: list[tuple[str, int]], peers: str) -> list[Row]:
    """Each in a process of its own, one after the other."""
    rows: list[Row] = []
    for tool, n in cases:
        python = sys.executable if tool == "regard" else peers
        patience = None if tool == "regard" else PATIENCE[n]
        found = one_page([python, str(PAGES), tool, str(n)], patience)
        version = found.pop("version", "")
        rows.append({"tokens": n, "tool": f"{tool} {version}".strip(), **found})
        print(rows[-1], flush=True)
    return rows


def one_page(command: list[str], patience: float | None) -> Row:
    """What a page took, or how far it got."""
    nothing = dict.fromkeys(("page MB", "page seconds", "of the CPU", "forward seconds"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            out, err = running.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            peak = peak_of(running.pid)
            running.kill()
            return {**nothing, "peak MB": peak, "so": f"given up after {patience} s"}
    if running.returncode:
        why = err.decode().strip().splitlines()[-1:] or [f"ended with {running.returncode}"]
        return {**nothing, "peak MB": None, "so": why[0][:90]}
    found = json.loads(out.decode().splitlines()[-1])
    order = ("version", *nothing, "peak MB")
    return {name: rounded(found[name]) for name in order} | {"so": "done"}


def rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value


def peak_of(process: int) -> int | None:
    """The most memory that a process has held so far, in MB, where the system says so."""
    status = Path(f"/proc/{process}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    peaks = [int(line.split()[1]) // 1000 for line in lines if line.startswith("VmHWM")]
    return peaks[0] if peaks else None


@contextmanager
def browser() -> Iterator[Any]:
    """A tab of a real browser, or nothing where there is none."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), "")
    if not program:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running.new_page(viewport={"width": 1200, "height": 800})
        running.close()


def app(n: int, heads: int) -> list[Row]:
    """From a trace to the first map, and the slowest of the tiles at each level."""
    start = Clock()
    what = seen(n, heads)
    rows = [row("the forward pass, before the app", [start.taken()])]
    words = [f" word{i % 977}" for i in range(n)]
    with browser() as tab:
        start = Clock()
        with App(what, tokens=words) as running:
            if tab is not None:
                tab.goto(f"{running.url}#view=map")
                tab.wait_for_selector("canvas.map[data-ready=yes]", timeout=120_000)
                rows.append(row("first map visible in Chromium", [start.taken()]))
                tab.close()
            rows += questions(running, n, heads)
    return rows


def questions(running: App, n: int, heads: int) -> list[Row]:
    def ask(path: str) -> Taken:
        asked = urllib.request.Request(running.room + path, headers={"Cookie": running.cookie})
        start = Clock()
        with urllib.request.urlopen(asked) as answer:
            answer.read()
        return start.taken()

    rows = []
    for level in range(levels(n, n), -1, -1):
        last = max(0, -(-n // (256 << level)) - 1)
        places = sorted({(last, 0), (last, last), (last // 2, 0), (last, last // 2)})
        times = [
            ask(f"tile?map=0&head={head}&level={level}&row={row}&column={column}")
            for head in range(min(2, heads))
            for row, column in places
        ]
        rows.append(row(f"a tile of {1 << level} × {1 << level} pairs a cell", times))
    mean = f"row?map=0&heads={','.join(map(str, range(heads)))}&query={n - 1}"
    rows.append(row("a row, mean of all heads", [ask(mean) for _ in range(5)]))
    pair = f"cell?map=0&head=0&query={n - 1}&key=3"
    rows.append(row("one pair and its rank", [ask(pair) for _ in range(5)]))
    return rows


def row(what: str, times: list[Taken]) -> Row:
    clock, cpu = zip(*times, strict=True)
    return {
        "what": what,
        "seconds": round(median(clock), 3),
        "slowest": round(max(clock), 3),
        "of the CPU": round(median(cpu), 3),
        "most of the CPU": round(max(cpu), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="short and not kept")
    parser.add_argument("--peers", default=sys.executable, help="a Python that has the peers")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    checked = check()
    tools = ("regard", "bertviz", "circuitsvis")
    cases = [(tool, n) for n in (1024, 2048) for tool in tools]
    cases = cases[:1] if options.quick else [*cases, ("regard", 16384)]
    texts = [(4096, 8)] if options.quick else [(32768, HEADS), (102_400, 1)]
    tables = {f"A page of {LAYERS} layers of {HEADS} heads": pages(cases, options.peers)}
    for n, heads in texts:
        tables[f"The app: one layer over {n:,} tokens, heads: {heads}"] = app(n, heads)
    beside = "" if options.peers == sys.executable else " --peers PYTHON"
    more = {
        "command": f"python -m benchmarks.views.viewer{beside}",
        "load of the machine": f"{load:.1f} before, {os.getloadavg()[0]:.1f} after, "
        f"on {os.cpu_count()} cores",
        "model of the pages": "GPT-2 of random weights, the same for all, one text",
        "heads of the app": f"causal, width {WIDTH}, float32",
        "checked": checked,
    }
    write("viewer", tables, more, None if options.quick else options.out or RESULTS)


if __name__ == "__main__":
    main()
