"""What it takes to look at a whole model over a long text on a GPU: reading, then tiles on demand.

PYTHONPATH=src python -m benchmarks.views.viewer_gpu [--out FOLDER] [--commit HASH] [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import regard
from benchmarks.measurement import RESULTS, write
from benchmarks.models.watching import HEADS, LAYERS, build
from regard.seen import Seen
from regard.view.atlas import Atlas, Map
from regard.view.atlas.tiles import decoded, levels, tile

Row = dict[str, Any]


def read(n: int, device: str) -> tuple[Seen, list[Row]]:
    """The traces of every layer, and what they took."""
    model = build("watched", n, device)
    ids = torch.randint(1024, (1, n), generator=torch.Generator().manual_seed(1)).to(device)

    def run() -> None:
        with torch.no_grad():
            model(ids, use_cache=False)

    rows = [{"what": "a forward pass, unwatched", "seconds": seconds(run, device)}]
    # What kernels take to be compiled is no part of it.
    with regard.watch(model):
        run()
    with regard.watch(model, keep="traces") as seen:
        rows.append({"what": "a forward pass with all traces kept", "seconds": timed(run, device)})
    return seen, rows


def check(seen: Seen) -> str:
    """Whether a tile of pairs, and one of cells, hold the exact weights, before any is measured."""
    of = Atlas.of(seen)[0]
    trace = of.traces[0]
    exact = trace.weights(queries=slice(256, 512), keys=slice(0, 256), heads=[1])[0, 0]
    found = decoded(tile(of, 1, 0, 1, 0)).mean
    torch.testing.assert_close(found, exact.float().cpu(), rtol=2e-2, atol=1e-5)
    near = trace.weights(queries=slice(0, 512), keys=slice(0, 512), heads=[1])[0, 0].float().cpu()
    cells = near.unflatten(1, (256, 2)).unflatten(0, (256, 2))
    pooled = decoded(tile(of, 1, 1, 0, 0))
    torch.testing.assert_close(pooled.mean, cells.mean((1, 3)), rtol=6e-2, atol=1e-5)
    torch.testing.assert_close(pooled.most, cells.amax((1, 3)), rtol=6e-2, atol=1e-5)
    return "tiles agree with exact weights"


def tiles(of: Map, n: int, device: str) -> list[Row]:
    """The tiles at each level: along the diagonal, at the first keys, and between."""
    rows = []
    for level in range(levels(n, n), -1, -1):
        last = max(0, -(-n // (256 << level)) - 1)
        places = sorted({(last, 0), (last, last), (last // 2, 0), (last, last // 2)})
        taken = [
            seconds(partial(tile, of, head, level, *at), device, 3)
            for head in (0, HEADS - 1)
            for at in places
        ]
        what = f"a tile of {1 << level} × {1 << level} pairs a cell"
        rows.append({"what": what, "seconds": median(taken), "slowest": max(taken)})
    return rows


def seconds(run: Callable[[], Any], device: str, repeats: int = 3) -> float:
    """The median of a few runs after a first."""
    run()
    return median(timed(run, device) for _ in range(repeats))


def timed(run: Callable[[], Any], device: str) -> float:
    wait(device)
    start = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - start


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--quick", action="store_true", help="short, on any device, not kept")
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    n = 700 if options.quick else 102_400
    seen, rows = read(n, device)
    checked = check(seen)
    atlas = Atlas.of(seen)
    more = {
        "command": "python -m benchmarks.views.viewer_gpu",
        "model": f"GPT-2 small's shape, {LAYERS} layers of {HEADS} heads, random weights",
        "checked": checked,
    }
    if device == "cuda":
        more["gpu"] = torch.cuda.get_device_name()
        more["held"] = f"{torch.cuda.memory_allocated() / 2**30:.2f} GiB: weights and all traces"
    if options.commit:
        more["commit"] = options.commit
    tables = {
        f"Reading {n:,} tokens": rows,
        "Tiles of the first layer": tiles(atlas[0], n, device),
        "Tiles of the last layer": tiles(atlas[len(atlas.maps) - 1], n, device),
    }
    write("viewer_gpu", tables, more, None if options.quick else options.out or RESULTS)


if __name__ == "__main__":
    main()
