"""The app under more than a person asks of it: many clients at once, connections that are cut,
texts that are stopped at any moment, and at last an interrupt.

Meanwhile it holds no more memory than in the beginning, but for a bound; when all is quiet it holds
no more threads and sockets; when it has ended, nothing of it is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.view.http_client import Visitor

SERVE = """
from regard.view.web import serve
from tests.view.small_traces import seen, tokens
serve(seen(600), tokens=tokens(600), browser=False, ready=lambda url: print(url, flush=True))
"""
GROWTH = 400 << 20
"""Bytes by which memory may grow: what a text of 2,000 words takes while it is read, twice."""
QUESTIONS = (
    "index", "desk", "app.js", "visible?map=0", "statistics?map=0", "largest?map=0&head=0",
    "tile?map=0&head=0&level=0&row=0&column=0", "tile?map=0&head=0&level=1&row=0&column=0",
    "tile?map=0&head=0&level=1&row=0&column=0&exact=1", "row?map=0&heads=0&query=3",
    "column?map=0&heads=0&key=3", "cell?map=0&head=0&query=3&key=1", "page", "tile?map=0&head=99",
)  # fmt: skip
STATUSES = {200, 204, 205, 400, 429}


class Soaked:
    """An app in a process of its own, and what is seen of it from outside."""

    def __init__(self, folder: Path) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        assert self.process.stdout is not None
        self.visitor = Visitor.enter(self.process.stdout.readline().strip())

    def held(self) -> tuple[int, int, int]:
        """Bytes of memory, threads and open files, where the system tells."""
        of = Path(f"/proc/{self.process.pid}")
        if not of.exists():
            return 0, 0, 0
        memory = int((of / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return memory, len(list((of / "task").iterdir())), len(list((of / "fd").iterdir()))

    def post(self, name: str, **asked: object) -> int:
        return self.visitor.post(name, json.dumps(asked).encode()).status


def run(seconds: float) -> None:
    """Ask for so long, then interrupt the app; an AssertionError says what went wrong."""
    with tempfile.TemporaryDirectory() as name:
        soaked = Soaked(Path(name))
        try:
            _soak(soaked, seconds)
            assert not list(Path(name).glob("regard-*")), "files were left"
        finally:
            soaked.process.kill()
            soaked.process.communicate()


def _soak(soaked: Soaked, seconds: float) -> None:
    # Once each, so that what is made once is there before anything is measured.
    for question in QUESTIONS:
        soaked.visitor.get(question)
    _read(soaked, random.Random(0))
    _quiet(soaked)
    before = soaked.held()
    ended = threading.Event()
    wrong: list[str] = []
    outcomes: Counter[int] = Counter()

    def repeated(do: Callable[[Soaked, random.Random], int], seed: int) -> None:
        chance = random.Random(seed)
        while not ended.is_set():
            try:
                status = do(soaked, chance)
            except Exception as error:
                wrong.append(f"{do.__name__}: {type(error).__name__}: {error}")
                return
            outcomes[status] += 1
            if status not in STATUSES:
                wrong.append(f"{do.__name__}: {status}")

    doing = [_ask, _ask, _ask, _hang_up, _read, _stop]
    threads = [
        threading.Thread(target=repeated, args=(do, seed), daemon=True)
        for seed, do in enumerate(doing)
    ]
    for thread in threads:
        thread.start()
    most = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until and not wrong:
        most = max(most, soaked.held()[0])
        time.sleep(0.05)
    ended.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a client waits for an answer that does not come"
    assert not wrong, wrong
    assert min(outcomes[200], sum(outcomes.values()) - outcomes[200]) > 0, outcomes
    assert most - before[0] < GROWTH, f"memory grew by {most - before[0] >> 20} MB"
    _quiet(soaked)
    _, tasks, files = soaked.held()
    # Pools of PyTorch's own threads may be larger than before by what one more reader takes.
    assert tasks <= before[1] + 2 * (os.cpu_count() or 1), f"{tasks} threads, {before[1]} before"
    assert files <= before[2] + 2, f"{files} open files, {before[2]} before"
    _interrupt(soaked)


def _ask(soaked: Soaked, chance: random.Random) -> int:
    return soaked.visitor.get(chance.choice(QUESTIONS)).status


def _hang_up(soaked: Soaked, chance: random.Random) -> int:
    """Say some of a request, or all of it, and go."""
    visitor = soaked.visitor
    asked = f"GET {visitor.room}{chance.choice(QUESTIONS)} HTTP/1.1\r\n"
    asked += f"Host: 127.0.0.1:{visitor.port}\r\nCookie: {visitor.cookie}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", visitor.port), timeout=20) as line:
        line.sendall(asked.encode()[: chance.randrange(2 * len(asked))])
        time.sleep(chance.random() * 0.02)
    return 204


def _read(soaked: Soaked, chance: random.Random) -> int:
    n = chance.choice((20, 200, 2000))
    text = " ".join(f"word{chance.randrange(999)}" for _ in range(n))
    status = soaked.post("read", text=text, model="spelling", tokens=0)
    time.sleep(chance.random() * 0.3)
    return status


def _stop(soaked: Soaked, chance: random.Random) -> int:
    time.sleep(chance.random())
    return soaked.post("stop")


def _quiet(soaked: Soaked) -> None:
    """Wait until nothing is being read, and closed connections are gone."""
    soaked.post("stop")
    until = time.monotonic() + 30
    while json.loads(soaked.visitor.get("desk").body)["work"]["state"] == "running":
        assert time.monotonic() < until, "what was stopped goes on"
        time.sleep(0.05)
    time.sleep(0.5)


def _interrupt(soaked: Soaked) -> None:
    """In the middle of reading, with questions open."""
    long = " ".join(f"word{i}" for i in range(20_000))
    assert soaked.post("read", text=long, model="spelling", tokens=0) == 200
    lines = [socket.create_connection(("127.0.0.1", soaked.visitor.port)) for _ in range(5)]
    time.sleep(random.Random(1).random())
    soaked.process.send_signal(signal.SIGINT)
    said, complained = soaked.process.communicate(timeout=30)
    for line in lines:
        line.close()
    assert soaked.process.returncode in (0, 130), (soaked.process.returncode, complained)
    assert not complained, complained
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", soaked.visitor.port)).close()
        raise AssertionError("the port is still open")
    assert not said, f"nothing is said after the address: {said}"
