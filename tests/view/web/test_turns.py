"""What somebody waits for is computed before what is only made ready."""

from __future__ import annotations

import threading
import time

from regard.view.web.turns import Turns


def test_the_urgent_go_first_whoever_came_first() -> None:
    turns, order, threads = Turns(), list[str](), list[threading.Thread]()

    def work(name: str, urgent: bool) -> None:
        with turns.taken(urgent=urgent):
            order.append(name)

    turns.take(urgent=False)
    for name in ("later 1", "later 2", "now 1", "now 2"):
        thread = threading.Thread(target=work, args=(name, name.startswith("now")))
        thread.start()
        threads.append(thread)
        time.sleep(0.05)
    # Who gives its turn away for a moment has it again after all that is urgent.
    turns.give()
    turns.take(urgent=False)
    assert {"now 1", "now 2"} <= set(order)
    assert {*order[:2]} == {"now 1", "now 2"}
    turns.give()
    for thread in threads:
        thread.join(5)
    assert sorted(order) == ["later 1", "later 2", "now 1", "now 2"]
    assert not turns.busy
