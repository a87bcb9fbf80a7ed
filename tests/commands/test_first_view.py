"""Where `regard view` shows what it looks at: in the app, or in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from regard import cli
from regard.commands import first_view
from regard.commands import view as view_command
from regard.view.subjects import TextInfo
from tests.view.text_drawings import seen_model

pytestmark = pytest.mark.usefixtures("by_spelling")
TOKENS = ["<s>", " the", " cat", " sat", ".", " The"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the app was asked to show, on a machine where it could open."""
    asked: list[dict[str, Any]] = []

    class Shown:
        def __init__(self, atlas: Any, **how: Any) -> None:
            self.how = {"maps": [m.name for m in atlas.maps], **how}

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None: ...

        def hold(self, *, ready: Any, **how: Any) -> bool:
            asked.append(self.how | how)
            ready("http://127.0.0.1:1/secret/")
            return True

    monkeypatch.setattr(view_command, "App", Shown)
    monkeypatch.setattr(view_command, "why_not", lambda: "")
    monkeypatch.setenv("COLUMNS", "100")
    return asked


def view(*args: object) -> Result:
    return CliRunner().invoke(cli.app, ["view", *map(str, args)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.regard"
    seen_model(6).save(path, tokens=TOKENS)
    return path


def test_the_app_opens_by_itself(
    served: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    result = view("the reader reads")
    assert result.exit_code == 0, result.output
    known = {"told": TextInfo("the reader reads", "spelling"), "reader": None}
    how = {"maps": ["trace"], "port": 0, "browser": True, "view": "scale=linear", **known}
    assert served == [how]
    assert result.stdout.splitlines()[:2] == [
        "3 words compared by their spelling; no trained model",
        "http://127.0.0.1:1/secret/",
    ]
    assert "Ctrl+C ends it" in result.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("args", "view_of_it"),
    [
        (["--layer", 1, "--head", 2], "map=1&head=2"),
        (["--layer", "layers.2", "--head", -1], "map=2&head=3"),
        (["--layer", 1], "map=1"),
        (["--layer", 0, "--head", "mean"], "view=text&set=0,1,2,3"),
        (["--layer", 1, "--token", "cat"], "map=1&view=text&token=2"),
        (["--layer", 1, "--compare", "a dog"], "view=compare&other=a+dog&map=1"),
    ],
)
def test_it_starts_at_what_was_named(
    args: list[object], view_of_it: str, file: Path, served: list[dict[str, Any]]
) -> None:
    result = view(file, "--no-browser", "--port", 8123, *args)
    assert result.exit_code == 0, result.output
    assert [(s["view"], s["port"], s["browser"]) for s in served] == [(view_of_it, 8123, False)]


def test_without_a_name_it_starts_at_the_head_the_terminal_shows(
    file: Path, served: list[dict[str, Any]]
) -> None:
    assert view(file).exit_code == 0
    parts = dict(part.split("=") for part in served[0]["view"].split("&"))
    shown = view(file, "--terminal").stdout
    assert f"layer {parts.get('map', 0)}, head {parts['head']}, the sharpest" in shown


@pytest.mark.parametrize("option", ["--terminal", "--plain", "--numbers"])
def test_what_is_for_the_terminal_stays_there(
    option: str, file: Path, served: list[dict[str, Any]]
) -> None:
    result = view(file, option)
    assert "entropy  strongest" in result.stdout
    assert not result.stderr
    assert not served


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--no-browser", "--terminal"], "--port and --no-browser are about the app"),
        (["--compare", "b c", "--terminal"], "two texts are compared in the app"),
        (["--layer", "9"], "no such layer was seen"),
        (["--layer", "0", "--head", "9"], "accepted: 0 to 3, or mean"),
        (["--token", "dog"], "--token is not in the text"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_anything_opens(
    args: list[str], says: str, file: Path, served: list[dict[str, Any]]
) -> None:
    result = view(file, *args)
    assert result.exit_code == 2
    assert says in result.stderr
    assert not served


def test_a_step_that_does_not_end_is_left_behind(
    served: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would crash around a thread that computes."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(view_command.App, "hold", lambda self, **how: False)
    monkeypatch.setattr(view_command.os, "_exit", leave)
    assert view("a b", "--no-browser").exit_code == 130
    monkeypatch.setattr(view_command.App, "hold", lambda self, **how: True)
    assert view("a b", "--no-browser").exit_code == 0


def test_in_a_pipe_it_is_text_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = view("a b")
    assert result.stdout == view("a b", "--terminal").stdout
    assert "shown here, because standard output is no terminal" in result.stderr


@pytest.mark.parametrize(
    ("terminal", "built", "browser", "says"),
    [
        (True, True, True, ""),
        (True, True, False, "no browser"),
        (True, False, True, "has not been built"),
        (False, True, True, "no terminal"),
    ],
)
def test_why_the_app_does_not_open(
    terminal: bool,
    built: bool,
    browser: bool,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "regard.js").touch()
    monkeypatch.setattr(first_view.sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(first_view, "BUNDLE", tmp_path / ("regard.js" if built else "no.js"))
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(first_view.sys, "platform", "linux")
    monkeypatch.setattr(first_view.webbrowser, "get", lambda: object())
    if browser:
        monkeypatch.setenv("DISPLAY", ":0")
    assert (says in first_view.why_not()) if says else not first_view.why_not()
