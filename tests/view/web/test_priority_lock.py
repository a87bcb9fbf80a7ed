"""What somebody waits for is computed before what is only made ready."""

from __future__ import annotations

import threading
import time

import pytest

from regard.cancellation import step
from regard.view.atlas import Atlas
from regard.view.web import atlas_queries
from regard.view.web.atlas_queries import Answers
from regard.view.web.priority_lock import PriorityLock
from tests.view.small_traces import seen

ROW = {"map": "0", "heads": "0", "query": "3"}


def test_the_urgent_go_first_whoever_came_first() -> None:
    turns, order, threads = PriorityLock(), list[str](), list[threading.Thread]()

    def work(name: str, urgent: bool) -> None:
        with turns.taken(urgent=urgent):
            order.append(name)

    turns.take(urgent=True)
    for name in ("later 1", "later 2", "now 1", "now 2"):
        thread = threading.Thread(target=work, args=(name, name.startswith("now")))
        thread.start()
        threads.append(thread)
        time.sleep(0.05)
    assert order == []
    turns.give(urgent=True)
    for thread in threads:
        thread.join(5)
    assert {*order[:2]} == {"now 1", "now 2"}
    assert {*order[2:]} == {"later 1", "later 2"}
    assert not turns.busy


def test_what_takes_long_waits_between_two_steps_for_the_urgent() -> None:
    turns, order = PriorityLock(), list[str]()
    turns.take(urgent=False)
    turns.take(urgent=True)
    assert turns.wanted

    def rest() -> None:
        turns.give(urgent=False)
        turns.take(urgent=False)
        order.append("later")

    thread = threading.Thread(target=rest)
    thread.start()
    time.sleep(0.05)
    order.append("now")
    turns.give(urgent=True)
    thread.join(5)
    assert order == ["now", "later"]


def test_who_rests_is_still_waited_for_by_what_takes_long() -> None:
    turns, order = PriorityLock(), list[str]()

    def work(name: str, urgent: bool) -> None:
        with turns.taken(urgent=urgent):
            order.append(name)

    turns.take(urgent=True)
    threads = [
        threading.Thread(target=work, args=given) for given in (("later", False), ("now", True))
    ]
    for thread in threads:
        thread.start()
    with turns.rested(urgent=True):
        threads[1].join(5)
        time.sleep(0.05)
        assert order == ["now"]
    assert turns.wanted
    turns.give(urgent=True)
    threads[0].join(5)
    assert order == ["now", "later"]
    assert not turns.wanted


def test_a_row_is_answered_in_the_midst_of_a_step_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = Answers(Atlas.of(seen(12)))
    begun, answered, after = threading.Event(), threading.Event(), list[bool]()

    def badges(_: object) -> list[str]:
        begun.set()
        # One step, at whose end somebody has been answered.
        after.append(answered.wait(20))
        step()
        return ["", ""]

    monkeypatch.setattr(atlas_queries, "head_badges", badges)
    long = threading.Thread(target=lambda: answers.answer("badges", {"map": "0"}))
    long.start()
    assert begun.wait(20)
    assert len(answers.answer("row", ROW)[1]) == 4 * 12
    answered.set()
    long.join(20)
    assert after == [True]


def test_what_takes_long_does_not_go_on_while_a_row_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = Answers(Atlas.of(seen(12)))
    order, stepped, row = list[str](), threading.Event(), threading.Event()

    def badges(_: object) -> list[str]:
        row.wait(20)
        stepped.set()
        step()
        order.append("badges")
        return ["", ""]

    def line(self: Answers, *_: object) -> bytes:
        row.set()
        assert stepped.wait(20)
        time.sleep(0.1)
        order.append("row")
        return b""

    monkeypatch.setattr(atlas_queries, "head_badges", badges)
    monkeypatch.setattr(Answers, "_line", line)
    long = threading.Thread(target=lambda: answers.answer("badges", {"map": "0"}))
    long.start()
    while not answers._turns.busy:
        time.sleep(0.01)
    answers.answer("row", ROW)
    long.join(20)
    assert order == ["row", "badges"]
