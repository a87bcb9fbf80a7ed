"""The app over HTTP: what it answers, and to whom."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
import torch

import regard
from regard.view.atlas import tiles
from regard.view.web import App, redirect_file, serve
from regard.view.web import app as apps
from regard.view.web import atlas_queries as answers
from tests.view.http_client import Answer, Visitor, asked, sent
from tests.view.small_traces import HOSTILE, seen, tokens


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(seen(300), tokens=tokens(300)) as running:
        yield running


def ask(app: App, name: str, **headers: str) -> Answer:
    return Visitor.enter(app.url).get(name, **headers)


def get(app: App, name: str) -> bytes:
    status, _, body = ask(app, name)
    assert status == 200, body
    return body


def exact(app: App, head: int) -> torch.Tensor:
    return app.atlas[1].traces[0].weights(heads=[head])[0, 0]


def floats(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.float32)


def test_tiles_rows_columns_and_cells_are_exact(app: App) -> None:
    p = exact(app, 2)
    found = tiles.decoded(get(app, "tile?map=1&head=2&level=0&row=1&column=0")).mean
    torch.testing.assert_close(found, p[256:, :256], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(floats(get(app, "row?map=1&heads=2&query=77")), p[77])
    torch.testing.assert_close(floats(get(app, "column?map=1&heads=2&key=5")), p[:, 5])
    both = (exact(app, 0) + exact(app, 3)) / 2
    torch.testing.assert_close(floats(get(app, "row?map=1&heads=0,3&query=77")), both[77])
    cell = json.loads(get(app, "cell?map=1&head=2&query=77&key=5"))
    assert cell["weight"] == pytest.approx(p[77, 5].item())
    assert cell["rank"] == 1 + int((p[77] > p[77, 5]).sum())
    torch.testing.assert_close(floats(get(app, "largest?map=1&head=2")), p.amax(-1))
    assert floats(get(app, "visible?map=1")).tolist() == [*range(1, 301)]
    statistics = json.loads(get(app, "statistics?map=1"))
    assert statistics["first"][2] == pytest.approx(p[:, 0].mean().item(), abs=1e-4)


def test_the_index_names_layers_and_tokens(app: App) -> None:
    index = json.loads(get(app, "index"))
    assert [m["heads"] for m in index["maps"]] == [4, 4]
    assert index["texts"] == [tokens(300)]


def test_what_goes_wrong_is_told_and_logged(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: object, asked: object, go: object) -> bytes:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(answers.Answers.QUESTIONS, "visible", broken)
    status, _, body = ask(app, "visible?map=9")
    assert (status, body) == (500, b"RuntimeError: out of memory")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("regard.view.web.server", "ERROR")
    assert "in broken\n" in caplog.text, "where it was raised"
    _, _, key = app.cookie.partition("=")
    for secret in (app.secret, key, app.room):
        assert secret not in caplog.text
    caplog.clear()
    assert ask(app, "row?map=9")[0] == 400
    assert not caplog.records, "what is refused needs no traceback"


def test_hostile_tokens_travel() -> None:
    n = len(HOSTILE)
    with App(seen(n), tokens=HOSTILE) as running:
        assert json.loads(get(running, "index"))["texts"] == [HOSTILE]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "localhost:1"])
def test_other_hosts_are_refused(app: App, host: str) -> None:
    status, _, body = ask(app, "index", Host=host)
    assert status == 403
    assert b"Toy" not in body


def test_other_sites_and_other_paths_are_refused(app: App) -> None:
    visitor = Visitor.enter(app.url)
    key = {"Cookie": visitor.cookie}
    for site in ("cross-site", "same-site"):
        assert visitor.get("index", Sec_Fetch_Site=site).status == 403
    assert visitor.get("index", Sec_Fetch_Site="same-origin").status == 200
    for wrong in (
        "/", "/index", "/x/index", f"/{app.secret}", f"/{app.secret}/index", f"/{app.secret}//",
        visitor.room[:-1], f"{visitor.room}nothing", f"{visitor.room}../index", f"{visitor.room}/",
        "index", "*", "?", "//", "http:", "/" * 100, "%2f",
    ):  # fmt: skip
        status, _, said = asked(app.port, "GET", wrong, headers=key)
        assert (status, bool(said)) == (404, True), wrong
    line = f"GET http://[/ HTTP/1.1\r\nHost: 127.0.0.1:{app.port}\r\nConnection: close\r\n\r\n"
    assert sent(app.port, line.encode()).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "line", ["GET /", "GET / HTTP/0.9", "GET x / HTTP/0.9", "x", "GET / HTTP/2.0", "\x16\x03\x01"]
)
def test_what_is_no_request_is_refused_in_one(app: App, line: str) -> None:
    said = sent(app.port, f"{line}\r\nConnection: close\r\n\r\n".encode())
    assert said.startswith(b"HTTP/1.1 40")
    head, _, word = said.partition(b"\r\n\r\n")
    assert b"nosniff" in head
    assert word


def test_the_room_is_entered_with_the_cookie_alone(app: App) -> None:
    visitor = Visitor.enter(app.url)
    _, _, value = visitor.cookie.partition("=")
    assert visitor.cookie.startswith(f"regard-{app.port}=")
    assert app.secret not in (value, visitor.room.strip("/"))
    name = f"regard-{app.port}"
    for wrong in ("", value, f"regard-1={value}", f"{name}=", f"{name}={value}x"):
        status, _, said = visitor.get("index", Cookie=wrong)
        assert (status, b"address that regard view printed" in said) == (403, True), wrong
    assert visitor.get("index", Cookie=f"a=b; {visitor.cookie}; ä").status == 200
    # A file leads there, and so does a link of another program; a page in a frame does not.
    entered = asked(app.port, "GET", f"/{app.secret}/", headers={"Sec-Fetch-Site": "cross-site"})
    assert entered.status == 200
    assert "frame-ancestors 'none'" in entered.headers["Content-Security-Policy"]
    assert entered.headers["Referrer-Policy"] == "no-referrer"
    assert app.secret.encode() not in entered.body
    assert asked(app.port, "POST", f"/{app.secret}/", b"{}").status == 404


def test_answers_are_kept_by_nobody_and_framed_by_nobody(app: App) -> None:
    _, headers, _ = ask(app, "")
    assert headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    "wrong",
    [
        "tile?map=1",
        "tile?map=9&head=0&level=0&row=0&column=0",
        "tile?map=0&head=0&level=0&row=0&column=0&quantity=magic",
        "tile?map=0&head=x&level=0&row=0&column=0",
        "row?map=0&heads=0&query=300",
        "row?map=0&heads=&query=3",
        "cell?map=0&head=0&query=3&key=-1",
        "statistics?map=-1",
        "statistics?map=" + "9" * 5000,
        "visible?map=2",
        "largest?map=0&head=99",
        "largest?map=0&head=-1",
        "tile?map=0&head=99&level=0&row=0&column=0",
        "tile?map=0&head=99&level=1&row=0&column=0",
        "tile?map=0&head=0&level=8000000000&row=0&column=0",
        "tile?map=0&head=0&level=-1&row=0&column=0",
        "tile?map=0&head=0&level=0&row=99999999999999999999&column=0",
        "tile?map=0&head=0&level=0&row=0&column=-1",
        "row?map=0&heads=0&query=-1",
        "row?map=0&heads=-1&query=0",
        "row?map=0&heads=0,1,2,3,3&query=0",
        "column?map=0&heads=0&key=99999999999999999999",
        "cell?map=0&head=4&query=3&key=1",
        "cell?map=0&head=0&query=-1&key=1",
        "cell?map=0&head=0&query=1&key=1&quantity=%ed%a0%80",
        "cell?" + "&".join(f"a{i}=1" for i in range(99)),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(app: App, wrong: str) -> None:
    began = time.process_time()
    status, _, body = ask(app, wrong)
    assert status == 400, body
    assert body
    assert time.process_time() - began < 0.5, "nothing was computed of the size that was asked"


def post(app: App, name: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    status, _, said = Visitor.enter(app.url).post(name, body, **headers)
    return status, said


ASKED = json.dumps({"text": "to be or not", "model": "spelling", "tokens": 0}).encode()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "multipart/form-data"}, 415),
        ({"Content_Type": ""}, 415),
        ({"Content_Length": str(1 << 40)}, 413),
        ({"Content_Length": "-1"}, 413),
        ({"Content_Length": "9" * 5000}, 413),
        ({"Content_Length": "x"}, 413),
        ({"Transfer_Encoding": "chunked"}, 411),
    ],
)
def test_what_changes_something_comes_from_the_page_alone(
    app: App, headers: dict[str, str], status: int
) -> None:
    for name in ("read", "stop"):
        assert post(app, f"{name}", ASKED, **headers)[0] == status
    assert app.session.now.number == 1
    assert app.session.work.state()["state"] == "idle"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"text"', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(app: App, body: bytes) -> None:
    assert post(app, "read", body)[0] == 400


def test_nothing_but_reading_and_stopping_can_be_sent(app: App) -> None:
    for wrong in ("", "index", "x/read", "read/"):
        assert post(app, wrong, ASKED)[0] == 404, wrong
    assert ask(app, "read")[0] == 404
    for method in ("PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "X"):
        assert asked(app.port, method, f"/{app.secret}/").status == 405


def test_a_text_that_is_sent_takes_the_place_of_the_one_before() -> None:
    with App(seen(20)) as app:
        before = json.loads(get(app, "desk"))
        assert before["edition"] == 1
        assert "spelling" in [model["name"] for model in before["models"]]
        origin = {"Origin": f"http://127.0.0.1:{app.port}", "Sec_Fetch_Site": "same-origin"}
        status, body = post(app, "read", ASKED, **origin)
        assert status == 200, body
        app.session.work.wait(10)
        assert json.loads(get(app, "desk"))["edition"] == 2
        assert json.loads(get(app, "index"))["texts"] == [["to", "be", "or", "not"]]
        assert len(floats(get(app, "row?map=0&heads=0&query=0&edition=2"))) == 4
        # Who still looks at the text before goes on with it; one that is not kept is gone.
        status, headers, row = ask(app, "row?map=0&heads=0&query=0&edition=1")
        assert (status, headers["Edition"], len(floats(row))) == (200, "1", 20)
        assert json.loads(get(app, "desk?edition=1"))["text"] == ""
        status, headers, _ = ask(app, "row?map=0&heads=0&query=0&edition=7")
        assert (status, "Edition" in headers) == (205, False)
        assert ask(app, "index")[1]["Edition"] == "2"
        status, body = post(app, "read", b'{"text": "", "model": "spelling"}')
        told = json.loads(body)
        assert (status, told["edition"], told["work"]["state"]) == (200, 2, "done")
        assert told["refused"].startswith("there is nothing to read")


def test_who_hangs_up_stops_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    bands: list[float] = []
    stopped = threading.Event()

    def slow(*place: object, go: tiles.Go, **how: object) -> bytes:
        for band in range(400):
            if not go(band / 400):
                stopped.set()
                raise tiles.CancelledError
            bands.append(band)
            time.sleep(0.01)
        return b""

    monkeypatch.setattr(answers, "tile", slow)
    with App(seen(20)) as running:
        line = socket.create_connection(("127.0.0.1", running.port))
        visitor = Visitor.enter(running.url)
        line.sendall(
            f"GET {visitor.room}tile?map=0&head=0&level=0&row=0&column=0&exact=1 HTTP/1.1\r\n"
            f"Host: 127.0.0.1:{running.port}\r\nCookie: {visitor.cookie}\r\n\r\n".encode()
        )
        while len(bands) < 3:
            time.sleep(0.01)
        # Others are answered in between.
        assert json.loads(get(running, "cell?map=0&head=0&query=3&key=1"))["rank"] >= 1
        line.close()
        assert stopped.wait(3)
    assert len(bands) < 400


def test_closing_frees_the_port() -> None:
    with App(seen(5)) as running:
        port = running.port
        with pytest.raises(regard.RegardError, match="cannot listen"):
            App(seen(5), port=port)
    with App(seen(5), port=port) as again:
        assert again.port == port


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_serve_opens_the_browser_and_ends_with_a_signal(
    ending: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    opened: list[tuple[str, str, int]] = []

    def open_file(address: str) -> None:
        path = Path(url2pathname(urlsplit(address).path))
        opened.append((address, path.read_text(), path.stat().st_mode | path.parent.stat().st_mode))
        signal.raise_signal(ending)

    before = signal.getsignal(ending)
    monkeypatch.setattr(apps.webbrowser, "open", open_file)
    serve(seen(5), ready=said.append, view="head=1&map=0")
    (address,), ((file, page, mode),) = said, opened
    assert address.endswith("/#head=1&map=0")
    # The address is in a file for this user alone, which is gone when it is of no more use.
    assert file.startswith("file://")
    assert urlsplit(address).path.strip("/") not in file
    assert f'url={html.escape(address)}"' in page
    assert mode & 0o077 == 0
    assert not Path(url2pathname(urlsplit(file).path)).parent.exists()
    assert signal.getsignal(ending) is before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(address.split(":")[2].split("/")[0])))


def test_where_no_file_can_be_written_no_browser_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def full(path: Any, *how: Any, **more: Any) -> int:
        if str(path).endswith(".html"):
            raise OSError(28, "No space left on device")
        return real(path, *how, **more)

    opened: list[str] = []
    monkeypatch.setattr(apps.webbrowser, "open", opened.append)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(redirect_file.os, "open", full)
    said: list[str] = []
    with App(seen(5)) as app:
        holding = threading.Thread(target=lambda: app.hold(browser=True, ready=said.append))
        holding.start()
        until = time.monotonic() + 5
        while not caplog.records:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert "No space left on device" in caplog.text
        assert app.secret not in caplog.text
        assert Visitor.enter(said[0]).get("index").status == 200
    holding.join(5)
    assert not holding.is_alive(), "an app that was closed holds nobody"
    assert not opened
    assert not list(tmp_path.iterdir())


def test_the_file_is_gone_once_the_app_was_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[Path] = []

    def browse(address: str) -> None:
        files.append(Path(url2pathname(urlsplit(address).path)))
        found = re.search(r'url=(http[^"]*)"', files[0].read_text())
        assert found is not None
        Visitor.enter(found[1])

    monkeypatch.setattr(apps.webbrowser, "open", browse)
    with App(seen(5)) as app:
        holding = threading.Thread(target=lambda: app.hold(browser=True))
        holding.start()
        until = time.monotonic() + 5
        while not files or files[0].parent.exists():
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.parametrize("browser", [True, False])
def test_serving_prints_the_address(
    browser: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class HeardError(Exception):
        pass

    def wait(app: App, *, browser: bool, view: str, ready: Callable[[str], None]) -> None:
        ready(app.url)
        raise HeardError(app.url)

    monkeypatch.setattr(App, "hold", wait)
    with pytest.raises(HeardError) as heard:
        serve(seen(5), browser=browser)
    assert capsys.readouterr().out == f"{heard.value}\n"
