"""What the web views take: the size and time of a page, and how long tiles of a long text take.

PYTHONPATH=src python benchmarks/viewer.py [--out FOLDER] [--quick]
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median

import torch
from measuring import RESULTS, write

import regard
from regard import masks
from regard.view import App, page
from regard.view.atlas import Atlas
from regard.view.tiles import decoded, levels, tile
from regard.watching.seen import Layer, Seen

LAYERS, HEADS, WIDTH = 4, 8, 64


def seen(n: int, layers: int) -> Seen:
    """Causal layers whose heads look back, at copies and at a sink, as trained ones do."""
    torch.manual_seed(0)
    found = Seen("structured heads")
    place = torch.arange(n)[:, None] / 500 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
    words = torch.randn(97, WIDTH)[torch.randint(97, (n,))]
    for at in range(layers):
        q, k = torch.randn(2, 1, HEADS, n, WIDTH).unbind()
        for head in range(HEADS):
            if head % 4 == 0:
                k[0, head] = torch.cat([place.cos(), place.sin()], -1) * (1 + head / 8)
                q[0, head] = k[0, head] + 0.3 * q[0, head]
            elif head % 4 == 1:
                q[0, head], k[0, head] = words * 0.7, words.roll(1, 0)
            elif head % 4 == 2:
                k[0, head, 0] = 2 * q[0, head].mean(0) + 1
                q[0, head] += 0.3
        layer = Layer(f"layers.{at}.self_attn")
        layer.take(regard.trace(q, k, q, mask=masks.causal()), 0, 0, keep=True)
        found._layers[layer.path] = layer
    return found


def check() -> str:
    """Whether tiles hold the exact weights, before they are measured."""
    of = Atlas.of(seen(600, 1))[0]
    exact = of.traces[0].weights(heads=[1])[0, 0]
    found = decoded(tile(of, 1, 0, 1, 1)).mean
    torch.testing.assert_close(found, exact[256:512, 256:512], rtol=1e-3, atol=1e-6)
    return "tiles agree with exact weights"


def pages(lengths: list[int]) -> list[dict[str, object]]:
    rows = []
    for n in lengths:
        what = seen(n, LAYERS)
        words = [f" word{i % 977}" for i in range(n)]
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            made = page(what, Path(folder) / "page.html", tokens=words)
            taken = time.perf_counter() - start
            size = made.stat().st_size / 1e6
        rows.append({"tokens": n, "MB": round(size, 2), "seconds": round(taken, 2)})
    return rows


def app(n: int) -> list[dict[str, object]]:
    """From a trace to the first map, and the slowest of the tiles at each level."""
    what = seen(n, 1)
    rows: list[dict[str, object]] = []
    start = time.perf_counter()
    with App(what, tokens=[f" word{i % 977}" for i in range(n)]) as running:

        def ask(path: str) -> float:
            before = time.perf_counter()
            with urllib.request.urlopen(running.url + path) as answer:
                answer.read()
            return time.perf_counter() - before

        top = levels(n, n)
        ask("index")
        ask(f"tile?map=0&head=0&level={top}&row=0&column=0")
        first = time.perf_counter() - start
        rows.append({"what": "first map", "seconds": round(first, 3), "slowest": round(first, 3)})
        for level in range(top, -1, -1):
            last = max(0, -(-n // (256 << level)) - 1)
            places = sorted({(last, 0), (last, last), (last // 2, 0), (last, last // 2)})
            times = [
                ask(f"tile?map=0&head={head}&level={level}&row={row}&column={column}")
                for head in (1, 2)
                for row, column in places
            ]
            rows.append(
                {
                    "what": f"tile of {1 << level} × {1 << level} pairs a cell",
                    "seconds": round(median(times), 3),
                    "slowest": round(max(times), 3),
                }
            )
        heads = ",".join(map(str, range(HEADS)))
        for name, path in (
            (f"a row, mean of {HEADS} heads", f"row?map=0&heads={heads}&query={n - 1}"),
            ("one pair and its rank", f"cell?map=0&head=1&query={n - 1}&key=3"),
        ):
            times = [ask(path) for _ in range(5)]
            rows.append(
                {"what": name, "seconds": round(median(times), 3), "slowest": round(max(times), 3)}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="short and not kept")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    checked = check()
    n = 4096 if options.quick else 32768
    tables = {
        f"A page of {LAYERS} layers of {HEADS} heads": pages(
            [1024] if options.quick else [1024, 4096, 16384]
        ),
        f"The app at {n} tokens": app(n),
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    more = {
        "heads": f"causal, width {WIDTH}, float32",
        "load of the machine before": f"{load:.1f} on {os.cpu_count()} cores",
        "checked": checked,
        "peak memory of everything": f"{peak:.1f} GB",
    }
    write("viewer", tables, more, None if options.quick else options.out or RESULTS)


if __name__ == "__main__":
    main()
