"""The app: a local web page that computes tiles when they are looked at.

It listens on the loopback alone, answers only requests that name it as their host and know its
secret path, and only reads. A client that hangs up stops what was being computed for it.
"""

from __future__ import annotations

import secrets
import select
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from regard.errors import RegardError
from regard.traces import Trace
from regard.view.answers import Answers
from regard.view.atlas import Atlas
from regard.view.bundle import script
from regard.view.tiles import CancelledError
from regard.watching.seen import Seen, Tokens

HOME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>regard</title>
<link rel="icon" href="data:,">
<style>html,body,#regard{height:100%;margin:0}</style>
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
        self.answers = Answers(self.atlas)
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


def serve(
    what: Trace | Seen | Atlas,
    tokens: Tokens | None = None,
    *,
    queries: Sequence[str] | None = None,
    batch: int = 0,
    port: int = 0,
    browser: bool = True,
    view: str = "",
    ready: Callable[[str], None] | None = None,
) -> None:
    """Show what was seen in a local web app, until it is interrupted with Ctrl+C or terminated.

    A free port is chosen unless one is named; `browser=False` opens none. `view` is what to look at
    first, as the end of the app's address tells it. `ready` is told the address once the app
    answers.
    """
    with App(what, tokens, queries=queries, batch=batch, port=port) as app, _ending() as ended:
        address = f"{app.url}#{view}" if view else app.url
        if ready is not None:
            ready(address)
        if browser:
            webbrowser.open(address)
        # With a limit, because without one an interrupt does not reach a wait on Windows.
        while not ended.wait(0.5):
            pass


@contextmanager
def _ending() -> Iterator[threading.Event]:
    """An event that an interrupt sets, or the wish of the system that this program ends."""
    ended = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield ended
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda *_: ended.set()) for each in signals]
    try:
        yield ended
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


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
        asked = {name: values[-1] for name, values in parse_qs(address.query).items()}
        if rest[0] == "":
            return self._send(200, "text/html; charset=utf-8", HOME.encode())
        if rest[0] == "regard.js":
            return self._send(200, "text/javascript; charset=utf-8", app.program.encode())
        if rest[0] not in Answers.QUESTIONS:
            return self._refuse(404, "there is nothing here")
        try:
            kind, body = app.answers.answer(rest[0], asked, self._wanted)
        except CancelledError:
            return self._send(204, "text/plain", b"")
        except RegardError as error:
            return self._refuse(400, str(error))
        return self._send(200, kind, body)

    def _wanted(self) -> bool:
        """Whether the client still listens."""
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
