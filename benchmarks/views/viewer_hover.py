"""From a mouse that reaches a word until its arcs are on the screen, in the app.

Also from a click that switches a head off until the changed prediction is there.

PYTHONPATH=src python -m benchmarks.views.viewer_hover [--moves N] [--quick]

The mouse really moves, over words of the example and of a passage of about 4,000 tokens, both read
by the bundled model. Counted is from the event's own time, which is when the browser had it, to the
frame that shows the word's arcs.
"""

from __future__ import annotations

import argparse
import os
import random
from statistics import median
from typing import Any

from benchmarks.measurement import RESULTS, write
from benchmarks.views.viewer import browser
from regard.commands.first_view import first_view
from regard.commands.named_subject import STORY, subject_of
from regard.view.subjects import ViewOptions
from regard.view.web import App

MODEL = "regard-small"
WATCH = """() => {
    const home = document.querySelector('.sentence')
    const said = document.querySelector('.said')
    let from = null
    window.taken = []
    said.addEventListener('pointerover', event => {
        const word = event.target.closest('.word')
        if (word) from = [event.timeStamp, word.dataset.place, performance.now()]
    }, true)
    new MutationObserver(() => {
        if (!from || home.dataset.asked !== from[1]) return
        const [start, , heard] = from
        from = null
        const told = performance.now()
        // A task after the next frame: then it is drawn.
        requestAnimationFrame(() => {
            const {port1, port2} = new MessageChannel()
            port1.onmessage = () =>
                window.taken.push([heard - start, told - heard, performance.now() - start])
            port2.postMessage(0)
        })
    }).observe(home, {attributes: true, attributeFilter: ['data-asked']})
}"""
PLACES = """() => {
    const {top, bottom} = document.querySelector('.room').getBoundingClientRect()
    return Array.from(document.querySelectorAll('.said .word'), word => {
        const box = word.getBoundingClientRect()
        return [box.x + box.width / 2, box.y + box.height / 2]
    }).filter(([, y]) => y > top + 10 && y < bottom - 10)
}"""
SWITCHED = """() => new Promise(done => {
    // What is off is a chip, and a click on that switches it on.
    const button = document.querySelector('.chip') ??
        [...document.querySelectorAll('.offers button')]
            .find(each => each.textContent === 'Layer 4 · head 5')
    const was = document.querySelector('.moved') !== null
    const start = performance.now()
    button.click()
    const look = () => {
        if ((document.querySelector('.moved') !== null) === was) requestAnimationFrame(look)
        else done(performance.now() - start)
    }
    requestAnimationFrame(look)
})"""
Row = dict[str, Any]


def hovered(what: str, text: str | None, moves: int) -> Row:
    """Point at words in an order that is drawn, each for a while."""
    subject = subject_of(text and [text], MODEL)
    atlas = subject.atlas()
    tokens = atlas[0].shape[1]
    with browser() as tab, App(atlas, told=subject.told, reader=subject.reader) as app:
        tab.set_viewport_size({"width": 1440, "height": 900})
        tab.goto(f"{app.url}#{first_view(subject, atlas, ViewOptions())}")
        tab.wait_for_selector(".sentence[data-asked]", timeout=60_000)
        heads = "Array.from(document.querySelectorAll('.head')).every(h => 'badge' in h.dataset)"
        for _ in range(2400):
            if tab.evaluate(heads):
                break
            tab.wait_for_timeout(50)
        tab.wait_for_timeout(500)
        tab.evaluate(WATCH)
        places = tab.evaluate(PLACES)
        drawn = random.Random(0)
        for _ in range(moves):
            tab.mouse.move(*drawn.choice(places))
            tab.wait_for_timeout(120)
        taken = tab.evaluate("window.taken")
    waits, works, whole = (sorted(each) for each in zip(*taken, strict=True))
    return {
        "text": what,
        "tokens": tokens,
        "hovers": len(whole),
        "median ms": round(median(whole), 1),
        "p95 ms": round(whole[int(0.95 * len(whole))], 1),
        "most ms": round(whole[-1], 1),
        "of it, until heard": round(median(waits), 1),
        "until told": round(median(works), 1),
    }


def switched(times: int) -> Row:
    """Switch a head of the example off, and on again."""
    subject = subject_of(None, MODEL)
    atlas = subject.atlas()
    with browser() as tab, App(atlas, told=subject.told, reader=subject.reader) as app:
        tab.set_viewport_size({"width": 1440, "height": 900})
        tab.goto(f"{app.url}#{first_view(subject, atlas, ViewOptions())}")
        tab.wait_for_selector(".bars tbody tr", timeout=60_000)
        tab.wait_for_timeout(500)
        taken = sorted([tab.evaluate(SWITCHED), tab.evaluate(SWITCHED)][0] for _ in range(times))
    return {
        "what": "a head is switched off",
        "times": times,
        "median ms": round(median(taken), 1),
        "p95 ms": round(taken[int(0.95 * times)], 1),
        "most ms": round(taken[-1], 1),
    }


def passage(words: int) -> str:
    return " ".join([STORY] * (words // len(STORY.split()) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--moves", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="not kept")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = []
    for what, text in (("the example", None), ("a passage", passage(3400))):
        rows.append(hovered(what, text, options.moves))
        print(rows[-1], flush=True)
    off = switched(20)
    print(off, flush=True)
    more = {
        "command": "python -m benchmarks.views.viewer_hover",
        "load of the machine": f"{load:.1f} before, {os.getloadavg()[0]:.1f} after, "
        f"on {os.cpu_count()} cores",
        "model": MODEL,
    }
    tables = {"Hover to arcs": rows, "What if": [off]}
    write("viewer_hover", tables, more, None if options.quick else RESULTS)


if __name__ == "__main__":
    main()
