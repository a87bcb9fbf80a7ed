"""The server of the app: which requests are heard, and what is sent back.

It listens on the loopback alone, and answers only requests that name it as their host, know its
secret path and come from no other site. What changes something has to be JSON as well, which no
form of another site can send. A client that hangs up stops what was being computed for it.
"""

from __future__ import annotations

import json
import logging
import secrets
import select
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from regard.errors import RegardError
from regard.view.answers import JSON, Answers
from regard.view.desk import Desk
from regard.view.tiles import CancelledError

logger = logging.getLogger(__name__)

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


TEXT = "text/plain; charset=utf-8"
LARGEST = 8 << 20
"""Bytes of a text that is sent to be read, at most."""


class Server(ThreadingHTTPServer):
    """Answers for a desk, to who knows the secret."""

    daemon_threads = True

    def __init__(self, port: int, desk: Desk, program: str) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.desk, self.program = desk, program.encode()
        self.secret = secrets.token_urlsafe(16)
        self.closing = threading.Event()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no error."""


class RefusedError(Exception):
    """A request that is not answered, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    edition: int | None = None
    """Which text an answer is about."""
    protocol_version = "HTTP/1.1"
    server_version = "regard"
    sys_version = ""

    def do_GET(self) -> None:
        self._heard(self._get)

    def do_POST(self) -> None:
        # A body that is refused stays unread: the connection cannot be used again.
        self.close_connection = True
        self._heard(self._post)

    def _heard(self, answer: Callable[[str], tuple[str, bytes]]) -> None:
        self._send(*self._answered(answer))

    def _answered(self, answer: Callable[[str], tuple[str, bytes]]) -> tuple[int, str, bytes]:
        try:
            return 200, *answer(self._name())
        except RefusedError as refused:
            return refused.status, TEXT, str(refused).encode()
        except RegardError as error:
            return 400, TEXT, str(error).encode()
        except CancelledError:
            return 204, TEXT, b""
        except ConnectionError:
            raise
        except Exception as error:
            # The page is told what happened, and the log where.
            logger.exception("a question of the app was not answered")
            return 500, TEXT, f"{type(error).__name__}: {error}".encode()

    def _name(self) -> str:
        """What is asked for, by someone who may."""
        server = self.server
        host = self.headers.get("Host")
        if host not in (f"127.0.0.1:{server.port}", f"localhost:{server.port}"):
            raise RefusedError(403, "this app answers to the loopback alone")
        site, origin = (self.headers.get(name) for name in ("Sec-Fetch-Site", "Origin"))
        if site not in ("same-origin", "none", None) or origin not in (f"http://{host}", None):
            raise RefusedError(403, "another site asked")
        _, given, *rest = urlsplit(self.path).path.split("/", 2)
        if not secrets.compare_digest(given.encode(), server.secret.encode()) or not rest:
            raise RefusedError(404, "there is nothing here")
        return rest[0]

    def _get(self, name: str) -> tuple[str, bytes]:
        server = self.server
        if name == "":
            return "text/html; charset=utf-8", HOME.encode()
        if name == "regard.js":
            return "text/javascript; charset=utf-8", server.program
        if name == "desk":
            return JSON, json.dumps(server.desk.about()).encode()
        if name not in Answers.QUESTIONS:
            raise RefusedError(404, "there is nothing here")
        query = parse_qs(urlsplit(self.path).query)
        asked = {name: values[-1] for name, values in query.items()}
        number, answers, _ = server.desk.now
        if asked.pop("edition", str(number)) != str(number):
            # Reset Content: another text was read meanwhile, and the page opens that.
            raise RefusedError(205, "")
        self.edition = number
        return answers.answer(name, asked, self._wanted)

    def _post(self, name: str) -> tuple[str, bytes]:
        if name not in ("read", "stop"):
            raise RefusedError(404, "there is nothing here")
        asked = self._body()
        desk = self.server.desk
        refused = ""
        try:
            if name == "read":
                desk.read(asked)
            else:
                desk.work.stop()
        except RegardError as error:
            refused = str(error)
        return JSON, json.dumps(desk.about() | {"refused": refused}).encode()

    def _body(self) -> dict[str, Any]:
        """The JSON object that was sent."""
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != JSON:
            raise RefusedError(415, f"only {JSON} is heard")
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or int(size) > LARGEST:
            raise RefusedError(413, f"a text of at most {LARGEST >> 20} MB is read")
        try:
            asked = json.loads(self.rfile.read(int(size)))
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict):
            raise RefusedError(400, "this is no JSON object")
        return asked

    def _wanted(self) -> bool:
        """Whether the client still listens."""
        if self.server.closing.is_set():
            return False
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return not (readable and not self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False

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
        if self.edition is not None:
            self.send_header("Edition", str(self.edition))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are nobody's business."""
