"""Typing a text in the app: who reads it, how far it is, what comes of it, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from regard.models import load
from regard.view.subjects import TextInfo
from regard.view.web import App
from regard.view.web import session as sessions
from tests.view import tiny_models
from tests.view.browser_page import MAP, Open, choose, until
from tests.view.small_traces import seen, tokens

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.xdist_group("browser")
TEXT = "The cat sat on the mat."


class Running(NamedTuple):
    app: App
    causal: str
    translator: str


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder: Path = tmp_path_factory.mktemp("models")
    return tiny_models.causal(folder / "causal"), tiny_models.translator(folder / "translator")


@pytest.fixture(autouse=True)
def running(folders: tuple[str, str]) -> Iterator[Running]:
    """For all, so that it begins before the pages and ends after them: they ask until they end."""
    causal, translator = folders
    with App(seen(40), tokens=tokens(40), told=TextInfo("", causal)) as app:
        app.session.models[translator] = "an encoder–decoder"
        yield Running(app, causal, translator)


def type_text(tab: Page, text: str, model: str, go_on: int = 0) -> None:
    tab.locator("#regard-model").select_option(model)
    tab.locator("#regard-tokens").fill(str(go_on))
    tab.get_by_label("Text", exact=True).first.fill(text)
    tab.get_by_role("button", name="Read").click()


def words(tab: Page) -> list[str]:
    tab.wait_for_selector(".word")
    return tab.locator(".word").all_inner_texts()


def test_a_typed_text_takes_the_place_of_the_one_before(open_page: Open, running: Running) -> None:
    tab = open_page(f"{running.app.url}#view=text&head=2&map=1&token=7&scale=row")
    assert len(words(tab)) == 40
    tab.evaluate("window.stays = true")
    type_text(tab, TEXT, running.causal)
    until(tab, "document.querySelector('.word')?.textContent === '<text>'")
    assert "".join(words(tab)[1:]).replace(" ", "") == TEXT.replace(" ", "")
    # Without loading the page again, and at the layer and head that were chosen.
    assert tab.evaluate("window.stays")
    assert "in layer 1 · head 2" in tab.locator(".stage h2").inner_text()
    until(tab, "!location.hash.includes('token=') && location.hash.includes('scale=row')")
    assert tab.locator("#regard-layer").input_value() == "1"
    assert tab.locator(".model").inner_text() == running.causal
    tab.get_by_role("button", name="Induction").click()
    until(tab, "document.querySelector('h2')?.textContent.includes('layer 1 · head 3')")
    tab.get_by_role("button", name="Previous token").click()
    until(tab, "document.querySelector('#regard-layer').value === '0'")
    tab.reload()
    assert words(tab)[0] == "<text>"
    assert tab.get_by_label("Text", exact=True).first.input_value() == TEXT
    assert tab.locator("#regard-model").input_value() == running.causal
    tab.locator("[data-view=map]").click()
    tab.wait_for_selector(MAP)


def test_the_keyboard_is_enough(open_page: Open, running: Running) -> None:
    tab = open_page(f"{running.app.url}#view=text")
    tab.get_by_label("Text", exact=True).first.focus()
    tab.keyboard.type("to be")
    tab.keyboard.press("Shift+Enter")
    tab.keyboard.type("or not [ ]")
    tab.keyboard.press("Tab")
    tab.keyboard.press("s")
    assert tab.locator("#regard-model").input_value() == "spelling"
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "regard-tokens"
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    until(tab, "document.querySelectorAll('.word').length === 4")
    tab.locator(".word.self").focus()
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("Enter")
    until(tab, "document.querySelector('h2')?.textContent.includes('#1 looks')")
    assert tab.evaluate("document.activeElement.textContent") == "be"
    assert tab.locator(".word[tabindex='0']").count() == 1


def test_progress_is_shown_and_stopped(
    open_page: Open, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "load", lambda name: tiny_models.slow(name, 0.03))
    tab = open_page(f"{running.app.url}#view=text")
    type_text(tab, TEXT, running.causal, 40)
    far = tab.locator(".far")
    until(tab, r"/reading … \d+%/.test(document.querySelector('.far')?.textContent)")
    assert tab.get_by_role("button", name="Read").is_disabled()
    assert 0 <= float(tab.locator("progress").get_attribute("value") or "-1") <= 1
    until(tab, r"/writing … \d+ of 40 tokens/.test(document.querySelector('.far').textContent)")
    # A page that is opened meanwhile shows it too.
    other = open_page(f"{running.app.url}#view=map")
    until(other, "document.querySelector('.far')?.textContent.includes('writing')")
    far.locator("xpath=..").get_by_role("button", name="Stop").click()
    until(tab, "document.querySelector('.status').textContent.startsWith('Stopped')")
    assert tab.get_by_role("status").first.inner_text().startswith("Stopped")
    assert tab.get_by_role("button", name="Read").is_enabled()
    assert len(words(tab)) == 40
    assert running.app.session.work.state()["state"] == "stopped"
    until(other, "document.querySelector('.status').textContent.startsWith('Stopped')")
    # And what comes then is not in its way.
    type_text(tab, "to be", "spelling")
    until(tab, "document.querySelectorAll('.word').length === 2")


@pytest.mark.parametrize(
    ("text", "go_on", "says"),
    [
        ("  ", 0, ["There is nothing to read.", "a text of a word or more"]),
        (TEXT * 30, 0, ["The text is longer than the model can read.", "64", "a shorter text"]),
        (TEXT, 5000, ["The number of tokens to generate is out of range.", "5000", "0 to 2000"]),
    ],
)
def test_what_cannot_be_read_is_told_in_the_page(
    text: str, go_on: int, says: list[str], open_page: Open, running: Running
) -> None:
    tab = open_page(f"{running.app.url}#view=text")
    # The limits of the field are those of the server, which does not rely on them.
    tab.wait_for_selector("form")
    tab.evaluate("document.querySelector('form').noValidate = true")
    type_text(tab, text, running.causal, go_on)
    tab.wait_for_selector("[role=alert]:not([hidden])")
    said = tab.get_by_role("alert").inner_text()
    for part in says:
        assert part in said
    assert len(words(tab)) == 40
    type_text(tab, "to be", "spelling")
    until(tab, "document.querySelectorAll('.word').length === 2")
    assert tab.get_by_role("alert").count() == 0


def test_what_a_model_writes_is_in_the_same_map(open_page: Open, running: Running) -> None:
    tab = open_page(f"{running.app.url}#view=map")
    type_text(tab, TEXT, running.causal, 6)
    tab.wait_for_selector(".wrote:not([hidden])")
    reader = load(running.causal)
    given, wrote = len(reader.read(TEXT)), reader.generate(TEXT, 6)
    assert tab.locator(".wrote bdi").text_content() == wrote
    until(tab, "document.querySelector('.facts')?.textContent.includes('Generated')")
    facts = tab.locator(".facts").inner_text()
    assert f"5 steps after {given} tokens" in facts
    assert f"{given + 5} × {given + 5}" in facts
    tab.locator("[data-view=text]").click()
    tab.wait_for_selector(".word.written")
    assert tab.locator(".word.written").count() == 5
    assert tab.locator(".word.written").first.get_attribute("data-place") == str(given)
    found = running.app.atlas[0].weights(0, range(given + 4, given + 5), range(given + 5))[0]
    best = tab.locator(".strongest .place").first.inner_text()
    assert best == f"#{int(found.argmax())}"


def test_encoder_decoder_and_what_lies_between(open_page: Open, running: Running) -> None:
    tab = open_page(f"{running.app.url}#view=text")
    type_text(tab, "The cat sat.", running.translator, 5)
    tab.get_by_role("radio", name="Cross-attention").wait_for()
    assert tab.get_by_role("radio", name="Encoder").is_checked()
    for part, layer in (("Decoder", "decoder.0.own"), ("Cross-attention", "decoder.0.memory")):
        choose(tab, part)
        until(
            tab,
            f"document.querySelector('#regard-layer').selectedOptions[0].title === '{layer}'",
        )
        assert tab.get_by_role("radio", name=part).is_checked()
    tab.wait_for_selector("h3")
    assert tab.locator("main h3").all_inner_texts() == ["Queries", "Keys"]
    of = running.app.atlas[2]
    queries, keys = tab.locator(".words").all()
    assert queries.locator(".word").count() == len(of.queries or "")
    assert keys.locator(".word").count() == len(of.keys or "")
    queries.locator(".word").nth(1).click()
    until(tab, "document.querySelector('h2')?.textContent.includes('#1 looks at')")
    best = int(of.weights(0, range(1, 2), range(of.shape[2]))[0].argmax())
    assert tab.locator(".strongest .place").first.inner_text() == f"#{best}"
    # A word of the other text turns the question round.
    tab.locator(".words").nth(1).locator(".word").nth(2).click()
    until(tab, "document.querySelector('h2')?.textContent.includes('#2 is seen by')")
    best = int(of.weights(0, range(of.shape[1]), range(2, 3))[:, 0].argmax())
    assert tab.locator(".strongest .place").first.inner_text() == f"#{best}"


def test_a_window_keeps_its_text_while_others_read(
    open_page: Open, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = open_page(f"{running.app.url}#view=text")
    assert len(words(behind)) == 40
    tab = open_page(f"{running.app.url}#view=map")
    type_text(tab, "to be or not", "spelling")
    until(tab, "document.querySelector('.model').textContent === 'spelling'")
    behind.locator(".word").nth(3).click()
    until(behind, "document.querySelector('h2')?.textContent.includes('#3 looks')")
    assert len(words(behind)) == 40
    behind.reload()
    assert len(words(behind)) == 40
    type_text(behind, TEXT, running.causal)
    until(behind, "document.querySelector('.word')?.textContent === '<text>'")
    assert tab.get_by_label("Text", exact=True).first.input_value() == "to be or not"
    tab.locator("[data-view=text]").click()
    assert words(tab) == ["to", "be", "or", "not"]
    # A text that is no longer kept gives way, and that is said.
    monkeypatch.setattr(sessions, "KEPT", 1)
    type_text(tab, "or not", "spelling")
    until(tab, "document.querySelectorAll('.word').length === 2")
    behind.locator(".word").nth(3).click()
    until(behind, "document.querySelectorAll('.word').length === 2")
    until(behind, "document.querySelector('.status').textContent.includes('no longer kept')")
    assert behind.get_by_label("Text", exact=True).first.input_value() == "or not"


def test_of_quick_reads_the_last_one_is_shown(
    open_page: Open, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "load", lambda name: tiny_models.slow(name, 0.01))
    tab = open_page(f"{running.app.url}#view=text")
    words(tab)
    tab.locator("#regard-model").select_option(running.causal)
    field = tab.get_by_label("Text", exact=True).first
    for many in range(1, 7):
        field.fill("sat " * many)
        field.press("Enter")
        tab.wait_for_timeout(30)
    shown = "[...document.querySelectorAll('.word')].map(e => e.textContent).join('')"
    until(tab, f"{shown}.replace(/[ ␣]/g, '') === '<text>' + 'sat'.repeat(6)")
    tab.wait_for_timeout(300)
    assert field.input_value() == "sat " * 6
    assert "".join(words(tab)).count("sat") == 6
    # A window whose turn has not come waits, and then reads its own.
    other = open_page(f"{running.app.url}#view=text")
    words(other)
    type_text(tab, "the cat sat on the mat", running.causal)
    other.get_by_label("Text", exact=True).first.fill("to be")
    other.locator("#regard-model").select_option("spelling")
    other.get_by_label("Text", exact=True).first.press("Enter")
    until(other, "document.querySelectorAll('.word').length === 2")
    until(tab, f"{shown}.replace(/[ ␣]/g, '') === '<text>thecatsatonthemat'")


def test_hostile_texts_are_text(open_page: Open, running: Running) -> None:
    tab = open_page(f"{running.app.url}#view=text")
    hostile = "x<script>alert(1)</script>x x<img/src=x/onerror=alert(2)>x \x00 שלום‮gnal {{7*7}}x"
    type_text(tab, hostile, "spelling")
    until(tab, "document.querySelector('.word')?.textContent.startsWith('x<script')")
    assert tab.locator(".regard img, .regard script").count() == 0
    assert "\\u202e" in "".join(words(tab))
    type_text(tab, "<script>alert(3)</script>", running.causal, 3)
    tab.wait_for_selector(".wrote:not([hidden])")
    assert tab.locator(".regard script").count() == 0


def test_narrow_windows_and_names(open_page: Open, running: Running) -> None:
    tab = open_page(f"{running.app.url}#view=text", color_scheme="dark")
    type_text(tab, "The cat sat.", running.translator)
    choose(tab, "Cross-attention")
    for width in (340, 1000):
        tab.set_viewport_size({"width": width, "height": 740})
        for view in ("overview", "text", "heads", "map"):
            tab.locator(f"[data-view={view}]").last.click()
            tab.wait_for_timeout(40)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (width, view)
    unnamed = tab.evaluate(
        """[...document.querySelectorAll('button, select, input, textarea')].filter(
          e => !(e.getAttribute('aria-label') || e.labels?.length ||
                 (e.closest('label') ?? e).textContent.trim())
        ).length"""
    )
    assert unnamed == 0


def test_an_app_that_ended_says_so(open_page: Open, folders: tuple[str, str]) -> None:
    with App(seen(5)) as app:
        tab = open_page(f"{app.url}#view=text")
        words(tab)
        # What the browser logs of a connection that is refused is its own.
        tab.evaluate("() => { window.fetch = () => Promise.reject(new TypeError('no')); }")
        type_text(tab, "to be", "spelling")
        tab.wait_for_selector("[role=alert]:not([hidden])")
        assert "The app does not answer." in tab.get_by_role("alert").inner_text()
        tab.locator("[data-view=overview]").click()
        told = tab.locator(".overview [role=alert]:not([hidden])")
        told.wait_for()
        assert "regard view still runs" in told.inner_text()
