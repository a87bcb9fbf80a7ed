"""The app over HTTP: what it answers, and to whom."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import regard
from regard.view import answers, tiles
from regard.view import app as apps
from regard.view.app import App, serve
from tests.view.toys import HOSTILE, seen, tokens


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(seen(300), tokens=tokens(300)) as running:
        yield running


def ask(app: App, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    line = http.client.HTTPConnection("127.0.0.1", app.port, timeout=20)
    try:
        line.request("GET", path, headers=headers)
        answer = line.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        line.close()


def get(app: App, name: str) -> bytes:
    status, _, body = ask(app, f"/{app.secret}/{name}")
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
    status, _, body = ask(app, f"/{app.secret}/visible?map=9")
    assert (status, body) == (500, b"RuntimeError: out of memory")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("regard.view.server", "ERROR")
    assert "in broken\n" in caplog.text, "where it was raised"
    caplog.clear()
    assert ask(app, f"/{app.secret}/row?map=9")[0] == 400
    assert not caplog.records, "what is refused needs no traceback"


def test_hostile_tokens_travel() -> None:
    n = len(HOSTILE)
    with App(seen(n), tokens=HOSTILE) as running:
        assert json.loads(get(running, "index"))["texts"] == [HOSTILE]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "localhost:1"])
def test_other_hosts_are_refused(app: App, host: str) -> None:
    status, _, body = ask(app, f"/{app.secret}/index", Host=host)
    assert status == 403
    assert b"Toy" not in body


def test_other_sites_and_other_paths_are_refused(app: App) -> None:
    path = f"/{app.secret}/index"
    assert ask(app, path, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert ask(app, path, **{"Sec-Fetch-Site": "same-origin"})[0] == 200
    for wrong in ("/", "/index", "/x/index", f"/{app.secret}", f"/{app.secret}/../index"):
        assert ask(app, wrong)[0] == 404, wrong
    assert ask(app, f"/{app.secret}/nothing")[0] == 404


def test_answers_are_kept_by_nobody_and_framed_by_nobody(app: App) -> None:
    _, headers, _ = ask(app, f"/{app.secret}/")
    assert headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


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
    ],
)
def test_what_makes_no_sense_is_refused_in_words(app: App, wrong: str) -> None:
    status, _, body = ask(app, f"/{app.secret}/{wrong}")
    assert status == 400
    assert body


def post(app: App, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    line = http.client.HTTPConnection("127.0.0.1", app.port, timeout=20)
    given = {"Content-Type": "application/json", **headers}
    try:
        line.request("POST", path, body, headers={k.replace("_", "-"): v for k, v in given.items()})
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


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
    ],
)
def test_what_changes_something_comes_from_the_page_alone(
    app: App, headers: dict[str, str], status: int
) -> None:
    for name in ("read", "stop"):
        assert post(app, f"/{app.secret}/{name}", ASKED, **headers)[0] == status
    assert app.desk.now.number == 1
    assert app.desk.work.state()["state"] == "idle"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"text"', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(app: App, body: bytes) -> None:
    assert post(app, f"/{app.secret}/read", body)[0] == 400


def test_nothing_but_reading_and_stopping_can_be_sent(app: App) -> None:
    for wrong in ("/read", "/x/read", f"/{app.secret}/index", f"/{app.secret}/"):
        assert post(app, wrong, ASKED)[0] == 404, wrong
    assert ask(app, f"/{app.secret}/read")[0] == 404


def test_a_text_that_is_sent_takes_the_place_of_the_one_before() -> None:
    with App(seen(20)) as app:
        before = json.loads(get(app, "desk"))
        assert before["edition"] == 1
        assert "spelling" in [model["name"] for model in before["models"]]
        origin = {"Origin": f"http://127.0.0.1:{app.port}", "Sec_Fetch_Site": "same-origin"}
        status, body = post(app, f"/{app.secret}/read", ASKED, **origin)
        assert status == 200, body
        app.desk.work.wait(10)
        assert json.loads(get(app, "desk"))["edition"] == 2
        assert json.loads(get(app, "index"))["texts"] == [["to", "be", "or", "not"]]
        assert len(floats(get(app, "row?map=0&heads=0&query=0&edition=2"))) == 4
        status, headers, _ = ask(app, f"/{app.secret}/row?map=0&heads=0&query=0&edition=1")
        assert (status, "Edition" in headers) == (205, False)
        assert ask(app, f"/{app.secret}/index")[1]["Edition"] == "2"
        status, body = post(app, f"/{app.secret}/read", b'{"text": "", "model": "spelling"}')
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
        asked = f"/{running.secret}/tile?map=0&head=0&level=0&row=0&column=0&exact=1"
        line.sendall(f"GET {asked} HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n\r\n".encode())
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
    opened: list[str] = []

    def ready(url: str) -> None:
        opened.append(url)
        signal.raise_signal(ending)

    before = signal.getsignal(ending)
    monkeypatch.setattr(apps.webbrowser, "open", opened.append)
    serve(seen(5), ready=ready, view="head=1")
    assert len(opened) == 2
    assert opened[0] == opened[1]
    assert opened[0].endswith("/#head=1")
    assert signal.getsignal(ending) is before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(opened[0].split(":")[2].split("/")[0])))
