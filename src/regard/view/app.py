"""The app: a local web page that computes tiles when they are looked at.

It listens on the loopback alone, answers only requests that name it as their host and know its
secret path, and only reads. A client that hangs up stops what was being computed for it.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import torch

from regard.errors import RegardError
from regard.traces import Trace
from regard.view.atlas import Atlas
from regard.view.bundle import script
from regard.view.tiles import CancelledError, raw, tile
from regard.watching.seen import Seen, Tokens

HOME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>regard</title>
<link rel="icon" href="data:,">
<style>html,body{height:100%;margin:0}</style>
</head>
<body>
<div id="regard" data-base="./"></div>
<script type="module" src="regard.js"></script>
</body>
</html>
"""
POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
Answer = tuple[str, bytes]
BYTES, JSON = "application/octet-stream", "application/json"


class App:
    """A running app. It stops when it is closed, or at the end of a `with`.

    >>> import regard, torch, urllib.request
    >>> x = torch.randn(1, 2, 5, 4)
    >>> with App(regard.trace(x, x, x)) as app:
    ...     with urllib.request.urlopen(app.url) as answer:
    ...         answer.status, app.url.startswith("http://127.0.0.1:")
    (200, True)
    """

    def __init__(
        self,
        what: Trace | Seen | Atlas,
        tokens: Tokens | None = None,
        *,
        queries: Sequence[str] | None = None,
        batch: int = 0,
        port: int = 0,
    ) -> None:
        self.atlas = Atlas.of(what, tokens, queries=queries, batch=batch)
        self.program = script()
        self.secret = secrets.token_urlsafe(16)
        self.computing = threading.Lock()
        self._statistics: dict[int, bytes] = {}
        try:
            self._server = _Server(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise RegardError(
                "the app cannot listen on this port",
                got=f"{port}: {error}",
                accepted="a free port, or 0 for any that is",
            ) from None
        self._server.app = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Where the app is; who knows it can look."""
        return f"http://127.0.0.1:{self.port}/{self.secret}/"

    def close(self) -> None:
        """Stop answering, and what is being computed."""
        self._server.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> App:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    @cached_property
    def index(self) -> bytes:
        return json.dumps(self.atlas.index()).encode()

    def statistics(self, place: int) -> bytes:
        if place not in self._statistics:
            self._statistics[place] = json.dumps(self.atlas[place].statistics()).encode()
        return self._statistics[place]


def serve(
    what: Trace | Seen | Atlas,
    tokens: Tokens | None = None,
    *,
    queries: Sequence[str] | None = None,
    batch: int = 0,
    port: int = 0,
    browser: bool = True,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Show what was seen in a local web app, until it is interrupted with Ctrl-C.

    A free port is chosen unless one is named; `browser=False` opens none. `ready` is told the
    address once the app answers.
    """
    with App(what, tokens, queries=queries, batch=batch, port=port) as app:
        if ready is not None:
            ready(app.url)
        if browser:
            webbrowser.open(app.url)
        try:
            _wait()
        except KeyboardInterrupt:
            return


def _wait() -> None:
    threading.Event().wait()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    app: App

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.closing = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "regard"
    sys_version = ""

    def do_GET(self) -> None:
        app = self.server.app
        names = {f"127.0.0.1:{app.port}", f"localhost:{app.port}"}
        if self.headers.get("Host") not in names:
            return self._refuse(403, "this app answers to the loopback alone")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return self._refuse(403, "another site asked")
        address = urlsplit(self.path)
        _, given, *rest = address.path.split("/", 2)
        if not secrets.compare_digest(given.encode(), app.secret.encode()) or not rest:
            return self._refuse(404, "there is nothing here")
        answer = self.ANSWERS.get(rest[0])
        if answer is None:
            return self._refuse(404, "there is nothing here")
        asked = {name: values[-1] for name, values in parse_qs(address.query).items()}
        try:
            kind, body = answer(self, asked)
        except CancelledError:
            return self._send(204, BYTES, b"")
        except (RegardError, KeyError, ValueError) as error:
            return self._refuse(400, f"{type(error).__name__}: {error}")
        return self._send(200, kind, body)

    def _home(self, asked: dict[str, str]) -> Answer:
        return "text/html; charset=utf-8", HOME.encode()

    def _script(self, asked: dict[str, str]) -> Answer:
        return "text/javascript; charset=utf-8", self.server.app.program.encode()

    def _index(self, asked: dict[str, str]) -> Answer:
        with self.server.app.computing:
            return JSON, self.server.app.index

    def _statistics(self, asked: dict[str, str]) -> Answer:
        with self.server.app.computing:
            return JSON, self.server.app.statistics(int(asked["map"]))

    def _largest(self, asked: dict[str, str]) -> Answer:
        app = self.server.app
        with app.computing:
            return BYTES, raw(app.atlas[int(asked["map"])].largest(int(asked["head"])))

    def _visible(self, asked: dict[str, str]) -> Answer:
        app = self.server.app
        with app.computing:
            return BYTES, raw(app.atlas[int(asked["map"])].visible)

    def _tile(self, asked: dict[str, str]) -> Answer:
        app = self.server.app
        of = app.atlas[int(asked["map"])]
        place = (int(asked[name]) for name in ("head", "level", "row", "column"))
        with app.computing:
            made = tile(
                of, *place,
                quantity=asked.get("quantity", "weight"), exact="exact" in asked, go=self._go,
            )  # fmt: skip
        return BYTES, made

    def _row(self, asked: dict[str, str]) -> Answer:
        return BYTES, self._line(asked, "query")

    def _column(self, asked: dict[str, str]) -> Answer:
        return BYTES, self._line(asked, "key")

    def _line(self, asked: dict[str, str], axis: str) -> bytes:
        """One row or column of the map, the mean over some heads."""
        app = self.server.app
        of = app.atlas[int(asked["map"])]
        _, Q, K = of.shape
        heads = [int(head) for head in asked["heads"].split(",")]
        place = int(asked[axis])
        one = range(place, place + 1)
        queries, keys = (one, range(K)) if axis == "query" else (range(Q), one)
        total = torch.zeros(K if axis == "query" else Q)
        for head in heads:
            with app.computing:
                total += of.weights(head, queries, keys).flatten()
            if not self._go(0.0, holding=False):
                raise CancelledError
        return raw(total / len(heads))

    def _cell(self, asked: dict[str, str]) -> Answer:
        app = self.server.app
        of = app.atlas[int(asked["map"])]
        head, query, key = (int(asked[name]) for name in ("head", "query", "key"))
        with app.computing:
            row = of.weights(
                head, range(query, query + 1), range(of.shape[2]), asked.get("quantity", "weight")
            )[0]
        if not 0 <= key < len(row):
            raise RegardError("there is no such key", got=str(key), accepted=f"0 to {len(row) - 1}")
        weight = row[key]
        found = {"weight": float(weight.nan_to_num(0.0)), "rank": 1 + int((row > weight).sum())}
        return JSON, json.dumps(found).encode()

    def _go(self, done: float, *, holding: bool = True) -> bool:
        """Whether to go on: the client still listens. Lets others compute in between."""
        if holding:
            self.server.app.computing.release()
            self.server.app.computing.acquire()
        if self.server.closing.is_set():
            return False
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return not (readable and not self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, "text/plain; charset=utf-8", why.encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", POLICY),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are nobody's business."""

    ANSWERS: ClassVar[dict[str, Callable[[_Handler, dict[str, str]], Answer]]] = {
        "": _home,
        "regard.js": _script,
        "index": _index,
        "statistics": _statistics,
        "largest": _largest,
        "visible": _visible,
        "tile": _tile,
        "row": _row,
        "column": _column,
        "cell": _cell,
    }
