"""Who visits the app without a browser: enters by its address, keeps the cookie, and asks."""

from __future__ import annotations

import http.client
import re
import socket
from typing import NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Visitor(NamedTuple):
    """Someone who was let in."""

    port: int
    room: str
    cookie: str

    @staticmethod
    def enter(address: str) -> Visitor:
        """Open an address of the app, as a browser does."""
        port, path = urlsplit(address).port, urlsplit(address).path
        assert port is not None
        answer = asked(port, "GET", path)
        assert answer.status == 200, answer
        room = re.search(r'location.replace\("\.\.(/[\w-]+/)"', answer.body.decode())
        assert room is not None, answer.body
        cookie, where, *how = answer.headers["Set-Cookie"].split("; ")
        assert where == f"Path={room[1]}"
        assert how == ["HttpOnly", "SameSite=Strict"]
        return Visitor(port, room[1], cookie)

    def get(self, name: str, **headers: str) -> Answer:
        return asked(self.port, "GET", self.room + name, None, {"Cookie": self.cookie} | headers)

    def post(self, name: str, body: bytes, **headers: str) -> Answer:
        given = {"Cookie": self.cookie, "Content-Type": "application/json"} | headers
        return asked(self.port, "POST", self.room + name, body, given)


def asked(
    port: int,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    timeout: float = 20,
) -> Answer:
    """One request on a connection of its own. In names of headers _ stands for -."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    given = {name.replace("_", "-"): value for name, value in (headers or {}).items()}
    try:
        line.request(method, path, body, given)
        answer = line.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read())
    finally:
        line.close()


def sent(port: int, data: bytes, timeout: float = 20) -> bytes:
    """All that comes back for some bytes, until the app closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as line:
        line.sendall(data)
        parts = []
        while part := line.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)
