"""Clients that are slow, many or gone: the app goes on, and nothing of them stays."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from regard.backends.tiled import TiledPass
from regard.seen import Seen
from regard.view.web import App, connections, server
from regard.view.web.connections import Connections
from tests.view.http_client import Visitor, sent
from tests.view.small_traces import seen


def until(what: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def dial(app: App) -> socket.socket:
    return socket.create_connection(("127.0.0.1", app.port), timeout=30)


@pytest.fixture(scope="module")
def long() -> Seen:
    return seen(4096, layers=1, heads=1, key_heads=1)


def head(app: App, name: str, *lines: str) -> bytes:
    visitor = Visitor.enter(app.url)
    first = f"POST {visitor.room}{name} HTTP/1.1\r\nHost: 127.0.0.1:{app.port}\r\n"
    first += f"Cookie: {visitor.cookie}\r\nContent-Type: application/json\r\n"
    return (first + "".join(f"{line}\r\n" for line in lines)).encode()


@pytest.mark.parametrize("drips", [False, True], ids=["silent", "dripping"])
@pytest.mark.parametrize("part", ["nothing", "line", "headers", "body"])
def test_who_does_not_finish_a_request_is_cut_off(
    part: str, drips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SILENT", 0.3)
    monkeypatch.setattr(connections, "SILENT", 0.3)
    with App(seen(5)) as app:
        begun = {
            "nothing": b"",
            "line": b"GET /a",
            "headers": head(app, "read", "X: y"),
            "body": head(app, "read", "Content-Length: 100", "") + b"{",
        }[part]
        with dial(app) as line:
            line.sendall(begun)
            began = time.monotonic()
            line.settimeout(0.1)
            while time.monotonic() - began < 5:
                try:
                    if drips and part != "nothing":
                        line.sendall(b"a")
                    if not line.recv(1000):
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
            assert time.monotonic() - began < 2
        assert until(lambda: len(app._server.connections) == 0)
        assert Visitor.enter(app.url).get("index").status == 200


def test_half_open_connections_do_not_keep_others_out() -> None:
    with App(seen(5)) as app:
        app._server.connections.most = 4
        lines = [dial(app) for _ in range(12)]
        assert until(lambda: len(app._server.connections) == 4)
        assert Visitor.enter(app.url).get("index").status == 200
        for line in lines:
            line.close()


def test_where_all_wait_for_an_answer_others_are_told_to_come_again() -> None:
    with App(seen(5)) as app:
        asked = head(app, "stop", "Content-Length: 2", "")
        open_ones = app._server.connections
        assert until(lambda: len(open_ones) == 0)
        open_ones.most = 1
        with dial(app) as line:
            # A body that is to come: the app waits, but has heard what is asked.
            line.sendall(asked)
            assert until(lambda: any(not each.is_idle for each in open_ones._open.values()))
            said = sent(app.port, b"GET / HTTP/1.1\r\n\r\n")
            assert said.startswith(b"HTTP/1.1 429 ")
            assert b"ask again" in said


def test_threads_and_connections_end_with_the_app() -> None:
    before = set(threading.enumerate())
    with App(seen(5)) as app:
        lines = [dial(app) for _ in range(3)]
        lines[0].sendall(b"GET /")
        lines[1].sendall(head(app, "read", "Content-Length: 9", ""))
        assert until(lambda: len(app._server.connections) == 3)
        began = time.monotonic()
    assert time.monotonic() - began < 2
    assert app.close()
    assert set(threading.enumerate()) <= before
    for line in lines:
        line.close()


@pytest.mark.parametrize(
    "question", ["page", "statistics?map=0", "tile?map=0&head=0&level=4&row=0&column=0&exact=1"]
)
def test_a_long_answer_ends_with_the_app(
    question: str, long: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    weights = TiledPass.weights

    def slowly(*given: Any) -> Any:
        asked.set()
        steps.append(given)
        time.sleep(0.5)
        return weights(*given)

    steps: list[Any] = []
    monkeypatch.setattr(TiledPass, "weights", slowly)
    before = set(threading.enumerate())
    with App(long) as app:
        client = threading.Thread(target=_ignored, args=(Visitor.enter(app.url), question))
        client.start()
        assert asked.wait(10)
        assert app.close()
        # All of them are eight at least.
        assert len(steps) < 4
    client.join(10)
    assert set(threading.enumerate()) <= before


def _ignored(visitor: Visitor, question: str) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        visitor.get(question)


def test_the_silent_go_first() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    open_ones = Connections(most=2)
    first = open_ones.add(pairs[0][0])
    assert first is not None
    first.expect(None)
    assert open_ones.add(pairs[1][0]) is not None
    assert open_ones.add(pairs[2][0]) is not None
    assert pairs[1][1].recv(1) == b""
    assert len(open_ones) == 2
    assert open_ones.of(pairs[0][0]) is first
    for pair in pairs:
        for each in pair:
            each.close()


def test_a_body_does_not_wait_for_its_headers_to_be_confirmed() -> None:
    with App(seen(5)) as app, contextlib.closing(dial(app)) as line:
        visitor = Visitor.enter(app.url)
        lines = f"Host: 127.0.0.1:{app.port}\r\nCookie: {visitor.cookie}\r\n\r\n"
        line.sendall(f"GET {visitor.room}index HTTP/1.1\r\n{lines}".encode())
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 200")
        mine = line.getsockname()
        here = [each for each in app._server.connections._open if _peer(each) == mine]
        assert [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in here] == [1]


def _peer(connection: socket.socket) -> Any:
    """Who is at the other end, if somebody is still there."""
    with contextlib.suppress(OSError):
        return connection.getpeername()
    return None
