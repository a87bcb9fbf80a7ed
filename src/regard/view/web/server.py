"""The server of the app: which requests are heard, and what is sent back.

It listens on the loopback alone, and answers only requests that name it as their host and come from
no other site. Its address holds a secret: who opens it is given a cookie, and is sent on to the
room where the app is. Neither helps without the other. The room's path keeps the cookie from other
servers of this machine, because browsers tell ports of one host apart by nothing; the cookie keeps
out who has seen the room's address on a screen. What changes something has to be JSON as well,
which no form of another site can send. A client that hangs up stops what was being computed for it,
and one that keeps the app waiting is cut off.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from regard.errors import RegardError
from regard.view.atlas import CancelledError
from regard.view.web.atlas_queries import JSON, Answers
from regard.view.web.connections import SILENT, SLOW, Connection, Connections
from regard.view.web.prediction_queries import PredictionAnswers
from regard.view.web.session import Session

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
<script type="module" src="app.js"></script>
</body>
</html>
"""
# The page moves on by itself: browsers send a strict cookie to where a page of the same site leads,
# and not along a redirect that began in a file. What follows the # is the view to begin with.
ENTER = 'location.replace("../ROOM/" + location.hash)'
ENTRANCE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>regard</title>
<link rel="icon" href="data:,">
</head>
<body>
<noscript>This page draws with JavaScript.</noscript>
<script>ENTER</script>
</body>
</html>
"""
POLICY = (
    "default-src 'none'; script-src {script}; connect-src 'self'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


HTML, TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
LARGEST = 8 << 20
"""Bytes of a text that is sent to be read, at most."""
PATIENCE = 5.0
"""Seconds that closing waits for a step of what is being computed, at most."""
STATUS = {501: 405, 505: 400}
"""What is wrong with a request is the client's fault, whatever Python's server calls it."""


Body = bytes | Iterator[bytes]
"""An answer, or its parts as they come."""
Reply = Callable[[str | None], tuple[str, Body]]
"""Gives the content type and the bytes of an answer to a request; None asks for the page itself."""


class Server(ThreadingHTTPServer):
    """Answers requests of a session, if they know the secret."""

    def __init__(self, port: int, session: Session, programs: Mapping[str, str]) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.session = session
        self.programs = {name: text.encode() for name, text in programs.items()}
        self.secret, self.room, self.key = (secrets.token_urlsafe(16) for _ in range(3))
        self.connections = Connections()
        self.closing = threading.Event()
        self.entered = threading.Event()
        """Set once the address was opened."""

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def cookie(self) -> str:
        """The name of its cookie: other apps of this machine have other ones."""
        return f"regard-{self.port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.connections.add(request) is None:
            self._turn_away(request)
            return
        self.connections.start(lambda: self.process_request_thread(request, client_address))

    def shutdown_request(self, request: Any) -> None:
        self.connections.remove(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called several times a second."""
        self.connections.cut_overdue(time.monotonic())

    def end(self) -> bool:
        """Stop listening and answering; whether every thread has ended."""
        self.closing.set()
        self.shutdown()
        self.server_close()
        return self.connections.end(PATIENCE)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no error."""

    def _turn_away(self, request: socket.socket) -> None:
        word = b"too many questions are being answered; ask again in a while"
        lines = f"Content-Type: {TEXT}\r\nContent-Length: {len(word)}\r\nConnection: close"
        request.settimeout(0.1)
        try:
            request.sendall(f"HTTP/1.1 429 Too Many Requests\r\n{lines}\r\n\r\n".encode() + word)
        except OSError:
            pass
        finally:
            self.shutdown_request(request)


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
    # The body follows the headers in a packet of its own, and would wait for the client to confirm
    # those: 40 ms with each answer.
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.line: Connection = self.server.connections.of(self.request)

    def handle_one_request(self) -> None:
        self.edition, self.given, self.policy = None, "", POLICY.format(script="'self'")
        self.line.expect(SILENT, is_idle=True)
        super().handle_one_request()

    def do_GET(self) -> None:
        # A body that is not read would pass for the next request.
        if self.headers.get("Content-Length") or self.headers.get("Transfer-Encoding"):
            self.close_connection = True
        self.line.expect(None)
        self._respond(self._get)

    def do_POST(self) -> None:
        # A body that is refused stays unread: the connection cannot be used again.
        self.close_connection = True
        self.line.expect(SILENT)
        self._respond(self._post)

    def _respond(self, answer: Reply) -> None:
        self._send(*self._answered(answer))

    def _answered(self, answer: Reply) -> tuple[int, str, Body]:
        try:
            return 200, *answer(self._name())
        except RefusedError as refused:
            return refused.status, TEXT, _text(str(refused))
        except RegardError as error:
            return 400, TEXT, _text(str(error))
        except CancelledError:
            return 204, TEXT, b""
        except ConnectionError:
            raise
        except Exception as error:
            # The page is told what happened, and the log where.
            logger.exception("a question of the app was not answered")
            return 500, TEXT, _text(f"{type(error).__name__}: {error}")

    def _name(self) -> str | None:
        """The path of an authorised request; None for the page itself."""
        server = self.server
        host = self.headers.get("Host")
        if host not in (f"127.0.0.1:{server.port}", f"localhost:{server.port}"):
            raise RefusedError(403, "this app answers requests from this machine only")
        first, _, name = self._path().removeprefix("/").partition("/")
        at_entrance = _same(first, server.secret)
        site, origin = (self.headers.get(name) for name in ("Sec-Fetch-Site", "Origin"))
        # A request with the secret may come from anywhere: a file, a chat, another window.
        came_here = site in ("same-origin", "none", None) or (at_entrance and self.command == "GET")
        if not came_here or origin not in (f"http://{host}", None):
            raise RefusedError(403, "the request comes from another site")
        if at_entrance and self._path() == f"/{server.secret}/":
            return None
        if not _same(first, server.room) or not self._path().startswith(f"/{server.room}/"):
            raise RefusedError(404, "there is nothing here")
        if not self._has_key():
            raise RefusedError(403, "open the app by the address that regard view printed")
        return name

    def _path(self) -> str:
        try:
            return urlsplit(self.path).path
        except ValueError:
            raise RefusedError(400, "this is not a valid address") from None

    def _has_key(self) -> bool:
        given = ";".join(self.headers.get_all("Cookie") or []).split(";")
        pairs = (pair.strip().partition("=") for pair in given)
        return any(name == self.server.cookie and _same(value, self.server.key)
                   for name, _, value in pairs)  # fmt: skip

    def _get(self, name: str | None) -> tuple[str, Body]:
        server = self.server
        if name is None:
            return HTML, self._entrance()
        if name == "":
            return HTML, HOME.encode()
        if name in server.programs:
            return "text/javascript; charset=utf-8", server.programs[name]
        says = name in PredictionAnswers.QUESTIONS
        if name == "gallery":
            return JSON, json.dumps(server.session.gallery()).encode()
        if not says and name not in (*Answers.QUESTIONS, "desk"):
            raise RefusedError(404, "there is nothing here")
        try:
            query = parse_qs(urlsplit(self.path).query, max_num_fields=32)
        except ValueError:
            raise RefusedError(400, "this is not a valid request") from None
        asked = {name: values[-1] for name, values in query.items()}
        shown = asked.pop("edition", None)
        if name == "desk":
            return JSON, json.dumps(server.session.about(shown)).encode()
        edition = server.session.edition(shown)
        if edition is None:
            # Reset Content: other texts were read meanwhile, and the page opens the last.
            raise RefusedError(205, "")
        self.edition = edition.number
        if says:
            return edition.says.answer(name, asked, self._wanted)
        return edition.answers.answer(name, asked, self._wanted)

    def _entrance(self) -> bytes:
        """A page that hands out the cookie and leads to the room."""
        server = self.server
        server.entered.set()
        self.given = (
            f"{server.cookie}={server.key}; Path=/{server.room}/; HttpOnly; SameSite=Strict"
        )
        script = ENTER.replace("ROOM", server.room)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        self.policy = POLICY.format(script=f"'sha256-{digest}'")
        return ENTRANCE.replace("ENTER", script).encode()

    def _post(self, name: str | None) -> tuple[str, bytes]:
        if name not in ("read", "beside", "stop"):
            raise RefusedError(404, "there is nothing here")
        asked = self._body()
        session = self.server.session
        told: dict[str, Any] = {"refused": ""}
        try:
            if name == "read":
                session.read(asked)
            elif name == "beside":
                told["beside"] = session.beside(asked)
            else:
                session.work.stop()
        except RegardError as error:
            told["refused"] = str(error)
        return JSON, json.dumps(session.about() | told).encode()

    def _body(self) -> dict[str, Any]:
        """The JSON object that was sent."""
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != JSON:
            raise RefusedError(415, f"only {JSON} is accepted")
        size = self.headers.get("Content-Length", "")
        if not size or self.headers.get("Transfer-Encoding"):
            raise RefusedError(411, "the request needs its length: Content-Length")
        if not size.isdecimal() or len(size) > 12 or int(size) > LARGEST:
            raise RefusedError(413, f"a text of at most {LARGEST >> 20} MB is read")
        body = self.rfile.read(int(size))
        if len(body) < int(size):
            raise RefusedError(408, "the request is incomplete")
        self.line.expect(None)
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict):
            raise RefusedError(400, "this is not a JSON object")
        return asked

    def _wanted(self) -> bool:
        """Whether the client still listens."""
        if self.server.closing.is_set():
            return False
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.connection, selectors.EVENT_READ)
                return not (selector.select(0) and not self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What Python's server refuses before it is looked at: lines that are no request."""
        self.close_connection = True
        self._send(STATUS.get(code, code), TEXT, _text(message or "this is no request"))

    def _send(self, status: int, kind: str, body: Body) -> None:
        self.line.expect(SLOW)
        # Python's server omits the headers for HTTP/0.9 requests, or without a version.
        self.request_version = "HTTP/1.1"
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            self._measured(body),
            ("Content-Security-Policy", self.policy),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        if self.edition is not None:
            self.send_header("Edition", str(self.edition))
        if self.given:
            self.send_header("Set-Cookie", self.given)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if isinstance(body, bytes):
            self.wfile.write(body)
        else:
            self._send_parts(body)

    def _measured(self, body: Body) -> tuple[str, str]:
        """The header that says where an answer ends."""
        if isinstance(body, bytes):
            return "Content-Length", str(len(body))
        return "Transfer-Encoding", "chunked"

    def _send_parts(self, parts: Iterator[bytes]) -> None:
        """An answer whose parts come one by one. Where one fails the answer has no end, by which a
        client knows."""
        self.close_connection = True
        for part in parts:
            self.line.expect(SLOW)
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.line.expect(None)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: they are private."""


def _text(said: str) -> bytes:
    """In bytes; half a character becomes a question mark."""
    return said.encode(errors="replace")


def _same(given: str, known: str) -> bool:
    """Compared in a time that says nothing about how much of it was right."""
    return secrets.compare_digest(given.encode(errors="replace"), known.encode())
