"""Requests that no browser sends: paths, parameters, headers and bodies changed at random, and
connections that are cut.

Whatever comes, the app answers with the right data or with a refusal in words; it never fails,
never hangs, and keeps nothing.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from urllib.parse import parse_qs, urlsplit

from regard import RegardError
from regard.view.web import App, connections, server
from regard.view.web.atlas_queries import Answers
from tests.view.small_traces import seen, tokens

TOKENS = 300
WAIT = 0.3
"""Seconds that the app waits here for the rest of a request."""
HANG = 10.0
GROWTH = 96 << 20
"""Bytes by which memory may grow while requests come."""
REFUSALS = {400, 403, 404, 405, 408, 411, 413, 414, 415, 429, 431}
NUMBERS = (
    "0", "1", "2", "3", "-1", "255", "256", "299", "300", "4294967296", "8000000000",
    "9" * 30, "9" * 5000, "-0", "+1", "1e3", "0x10", "1.5", "nan", "", " ", "٣", "1_0", "%00",
)  # fmt: skip
WORDS = (
    "weight",
    "logit",
    "magic",
    "%ed%a0%80",
    "%ff",
    "\x00",
    "é",
    "<script>",
    "../" * 20,
    "a" * 999,
)
SOUND = (
    "index", "desk", "app.js", "", "visible?map=0", "statistics?map=1", "largest?map=0&head=1",
    "tile?map=1&head=2&level=0&row=1&column=0", "tile?map=0&head=3&level=1&row=0&column=0&exact=1",
    "row?map=1&heads=0,3&query=77", "column?map=0&heads=2&key=5",
    "cell?map=1&head=2&query=77&key=5", "cell?map=0&head=0&query=9&key=3&quantity=logit",
    "index?edition=1", "index?edition=7",
)  # fmt: skip
BODIES = (
    {"text": "to be or not", "model": "spelling", "tokens": 0},
    {"text": "", "model": "spelling"},
    {"text": "a", "model": "/etc/passwd", "tokens": 0},
    {"text": "a \ud800 b", "model": "spelling"},
    {"text": "a b", "model": "spelling", "tokens": 10**30},
    {"text": ["a"], "model": None, "tokens": "x"},
    {},
)


class Request(NamedTuple):
    """What is sent: a line, headers and a body; and after how many bytes it is cut, if it is."""

    line: bytes
    headers: tuple[bytes, ...]
    body: bytes = b""
    cut: int | None = None

    @property
    def data(self) -> bytes:
        whole = b"\r\n".join([self.line, *self.headers, b"", b""]) + self.body
        return whole if self.cut is None else whole[: self.cut % (len(whole) + 1)]


class Failure(AssertionError):  # noqa: N818
    """The app did what it must never do."""


def run(cases: int, seed: int) -> dict[str, int]:
    """Send so many requests to an app of this process; what came of them, and how often."""
    chance = random.Random(seed)
    outcomes: Counter[str] = Counter()
    before = set(threading.enumerate())
    with (
        mock.patch.object(server, "SILENT", WAIT),
        mock.patch.object(connections, "SILENT", WAIT),
        App(seen(TOKENS), tokens=tokens(TOKENS)) as app,
    ):
        held = 0
        for case in range(cases):
            if case == min(200, cases // 2):
                held = memory()
            request = made(chance, app)
            try:
                outcomes[answered(app, request)] += 1
            except (Failure, TimeoutError) as error:
                raise Failure(f"case {case} of seed {seed}: {error}\n{request.data!r}") from None
        grown = memory() - held
    if grown > GROWTH:
        raise Failure(f"memory grew by {grown >> 20} MB in {cases} requests of seed {seed}")
    left = [thread.name for thread in set(threading.enumerate()) - before]
    if left:
        raise Failure(f"threads were left: {left}")
    return dict(outcomes)


def made(chance: random.Random, app: App) -> Request:
    """A sound request of a browser, changed in none, one or several ways."""
    room = urlsplit(app.room).path
    host = f"127.0.0.1:{app.port}"
    headers = [f"Host: {host}", f"Cookie: {app.cookie}", "Connection: close"]
    body = b""
    kind = chance.choice(("get", "get", "get", "post", "enter"))
    if kind == "enter":
        path, method = urlsplit(app.url).path, "GET"
    elif kind == "get":
        path, method = room + chance.choice(SOUND), "GET"
    else:
        path, method = room + chance.choice(("read", "stop")), "POST"
        body = json.dumps(chance.choice(BODIES)).encode()
        headers += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        headers.append(f"Origin: http://{host}")
    line = f"{method} {path} HTTP/1.1".encode(errors="replace")
    request = Request(line, tuple(header.encode() for header in headers), body)
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        request = chance.choice(CHANGES)(chance, request)
    return request


def _parameter(chance: random.Random, request: Request) -> Request:
    """One parameter gets another value, is repeated, or goes."""
    start, mark, rest = request.line.partition(b"?")
    if not mark:
        return request
    query, space, version = rest.partition(b" ")
    parts = query.split(b"&")
    at = chance.randrange(len(parts))
    name = parts[at].partition(b"=")[0]
    value = chance.choice(NUMBERS + WORDS).encode(errors="replace")
    new = chance.choice(([], [name + b"=" + value], [parts[at], parts[at]], [name], [value]))
    parts[at : at + 1] = new
    return request._replace(line=start + mark + b"&".join(parts) + space + version)


def _path(chance: random.Random, request: Request) -> Request:
    words = request.line.split(b" ")
    at = min(1, len(words) - 1)
    place = chance.randrange(len(words[at]) + 1)
    junk = chance.choice(
        (b"/", b"//", b"..", b"%2e%2e/", b"?", b"#", b"\x00", b"\xff", b"*", b"http://[", b";",
         b"@", b"a" * 70_000)
    )  # fmt: skip
    words[at] = chance.choice(
        (words[at][:place] + junk + words[at][place:], words[at][:place], junk)
    )
    return request._replace(line=b" ".join(words))


def _line(chance: random.Random, request: Request) -> Request:
    words = request.line.split(b" ")
    change = chance.randrange(4)
    if change == 0:
        words[0] = chance.choice((b"HEAD", b"PUT", b"TRACE", b"get", b"", b"\x16\x03\x01", b"POST"))
    elif change == 1:
        words[-1] = chance.choice((b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9" * 9, b"X", b""))
    elif change == 2:
        words.pop(chance.randrange(len(words)))
    else:
        words.insert(chance.randrange(len(words) + 1), b"x")
    return request._replace(line=b" ".join(words))


def _header(chance: random.Random, request: Request) -> Request:
    """A header goes, or another one comes before or after it."""
    headers = list(request.headers)
    new = chance.choice(
        (b"Host: evil.example", b"Host:", b"Cookie: x", b"Cookie: =;=;;,\xff", b"Origin: null",
         b"Sec-Fetch-Site: cross-site", b"Sec-Fetch-Site: same-origin",
         b"Content-Length: 99999999999", b"Content-Length: -1", b"Content-Length: 5",
         b"Content-Length: " + b"9" * 5000,
         b"Content-Length: \xb2", b"Transfer-Encoding: chunked", b"Content-Type: text/plain",
         b"Expect: 100-continue", b"Connection: keep-alive", b"Connection: upgrade", b"no colon",
         b": no name", b"X: " + b"y" * 70_000, b"\x00: \x00", b" folded", b"Range: bytes=0-1")
    )  # fmt: skip
    place = chance.randrange(len(headers) + 1)
    if headers and chance.random() < 0.4:
        headers[place % len(headers)] = new
    elif headers and chance.random() < 0.2:
        headers.pop(place % len(headers))
    elif chance.random() < 0.05:
        headers += [b"X-%d: y" % i for i in range(150)]
    else:
        headers.insert(place, new)
    return request._replace(headers=tuple(headers))


def _body(chance: random.Random, request: Request) -> Request:
    junk = chance.choice((b"", b"[]", b"{", b"null", b"\xff\xfe", b"[" * 5000, b'{"text": 1e999}'))
    body = bytearray(chance.choice((junk, request.body + junk, request.body[: len(junk)])))
    for _ in range(chance.randrange(3) if body else 0):
        body[chance.randrange(len(body))] = chance.randrange(256)
    return request._replace(body=bytes(body))


def _cut(chance: random.Random, request: Request) -> Request:
    return request._replace(cut=chance.randrange(1 << 16))


CHANGES: tuple[Callable[[random.Random, Request], Request], ...] = (
    _parameter, _parameter, _path, _line, _header, _header, _body, _cut,
)  # fmt: skip


def answered(app: App, request: Request) -> str:
    """What came back, in a word; a `Failure` if it must not come."""
    began = time.monotonic()
    data = request.data
    with socket.create_connection(("127.0.0.1", app.port), timeout=HANG) as line:
        with contextlib.suppress(ConnectionError):
            line.sendall(data)
        if request.cut is not None:
            return "hung up"
        said = bytearray()
        # The app may close with something of ours unread; then the rest of its answer is lost.
        with contextlib.suppress(ConnectionError):
            while part := line.recv(1 << 16):
                said += part
    if time.monotonic() - began > HANG:
        raise Failure("it took too long")
    answers = list(parsed(bytes(said)))
    for status, headers, body in answers:
        checked(app, request, status, headers, body)
    if answers:
        return str(answers[0][0])
    if is_whole(data) and len(data) < 60_000:
        raise Failure(f"it was not answered: {bytes(said)!r}")
    return "cut off"


def checked(app: App, request: Request, status: int, headers: dict[str, str], body: bytes) -> None:
    """An answer is right, or a refusal in words."""
    app.session.work.wait(HANG)
    if status in REFUSALS:
        if not body:
            raise Failure(f"{status} without a word")
    elif status == 200 and headers.get("edition") == str(app.session.now.number):
        address = urlsplit(request.line.split()[1].decode("latin-1"))
        name = address.path.rpartition("/")[2]
        asked = {k: v[-1] for k, v in parse_qs(address.query).items() if k != "edition"}
        try:
            _, right = Answers(app.atlas).answer(name, asked)
        except RegardError as error:
            raise Failure(f"what makes no sense was answered: {error}") from None
        if body != right:
            raise Failure("the data are wrong")
    elif status not in (100, 200, 205):
        raise Failure(f"{status}: {body[:300]!r}")


def parsed(said: bytes) -> Iterator[tuple[int, dict[str, str], bytes]]:
    """The answers of a connection, one after the other."""
    while said:
        head, end, said = said.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        if not end or not first.startswith("HTTP/1.1 "):
            raise Failure(f"this is no answer: {head[:300]!r}")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
        size = int(headers.get("content-length", "0"))
        yield int(first.split(" ")[1]), headers, said[:size]
        said = said[size:]


def is_whole(data: bytes) -> bool:
    """Whether a request is one that has to be answered: a first line, an end of its headers, and
    as much of a body as it says."""
    head, end, body = data.partition(b"\r\n\r\n")
    if not end or not head.partition(b"\r\n")[0].strip():
        return False
    sizes = [
        line.partition(b":")[2].strip()
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length")
    ]
    return all(size.isdigit() and int(size[:9]) <= len(body) for size in sizes)


def memory() -> int:
    """Bytes that this process holds, where the system says so."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0
