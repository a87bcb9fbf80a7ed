"""A real browser for the web views, which may reach nothing but the loopback."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from regard.seen import Seen
from regard.view.web import page as write_page
from tests.view.browser_page import Open
from tests.view.small_traces import seen, tokens

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)

# Two pages of Chromium's own wait behind the address bar of every window, for suggestions, and take
# twice the time of the page under test. Of several such flags the last one counts: what Playwright
# switches off is switched off again.
UNUSED = (
    "WebUIOmniboxPopup", "WebUIOmniboxAimPopup", "SpareRendererForSitePerProcess",
    "AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades",
    "HttpsFirstBalancedModeAutoEnable", "LensOverlay", "MediaRouter", "PaintHolding",
    "ThirdPartyStoragePartitioning", "AvoidCorsURLLoaderRestartOnRedirect", "OptimizationHints",
    "NetworkTimeServiceQuerying", "AimEnabled", "PreconnectToSearch",
)  # fmt: skip
FLAGS = ["--no-sandbox", f"--disable-features={','.join(UNUSED)}"]


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """One for all views; each page is opened in a context of its own."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium here")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens an address. At the end, nothing may have been logged or asked of the network."""
    complaints: list[str] = []
    contexts = []

    def asked(request: Any) -> None:
        address = urlsplit(request.url)
        if address.scheme not in ("file", "data", "blob") and address.hostname != "127.0.0.1":
            complaints.append(f"asked for {request.url}")

    def said(message: Any) -> None:
        if not ("net::ERR_" in message.text and _is_closed(message.location["url"])):
            complaints.append(message.text)

    def opened(url: str, **how: object) -> Any:
        context = browser.new_context(viewport={"width": 1200, "height": 800}, **how)
        context.set_default_timeout(60_000)  # patience is free: a busy machine is no fault
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", said)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: complaints.append(dialog.message))
        tab.on("request", asked)
        tab.goto(url)
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def _is_closed(url: str) -> bool:
    """Whether nobody answers there any more. A page may outlive its app and ask it in vain: before
    it closes, while it does, or between the headers of an answer and its body."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname or "", address.port or 0), 60.0).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.fixture(scope="module")
def short() -> Seen:
    return seen(40)


@pytest.fixture(scope="module")
def short_page(short: Seen, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "short.html"
    return write_page(short, path, tokens=tokens(40)).as_uri()
