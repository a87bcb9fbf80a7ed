"""The app: a local web page that computes tiles when they are looked at, and reads other texts."""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from regard.errors import RegardError
from regard.models.readers import Reader
from regard.seen import Seen, Tokens
from regard.traces import Trace
from regard.view.atlas import Atlas, Weights
from regard.view.subjects import TextInfo
from regard.view.web.bundle import script
from regard.view.web.redirect_file import RedirectFile
from regard.view.web.server import Server
from regard.view.web.session import Session

logger = logging.getLogger(__name__)


class App:
    """A running app. It stops when it is closed, or at the end of a `with`.

    `told` is the text that was read and the name of the model that read it, if they are known, and
    `reader` that model, if it is open.

    >>> import regard, torch, urllib.request
    >>> x = torch.randn(1, 2, 5, 4)
    >>> with App(regard.trace(x, x, x)) as app:
    ...     with urllib.request.urlopen(app.url) as answer:
    ...         answer.status, app.url.startswith("http://127.0.0.1:")
    (200, True)
    """

    def __init__(
        self,
        what: Trace | Seen | Weights | Atlas,
        tokens: Tokens | None = None,
        *,
        queries: Sequence[str] | None = None,
        batch: int = 0,
        port: int = 0,
        told: TextInfo | None = None,
        reader: Reader | None = None,
    ) -> None:
        atlas = Atlas.of(what, tokens, queries=queries, batch=batch)
        self.session = Session(atlas, told, reader)
        programs = {"app.js": script("app"), "later.js": script("later")}
        try:
            self._server = Server(port, self.session, programs)
        except (OSError, OverflowError) as error:
            raise RegardError(
                "the app cannot listen on this port",
                got=f"{port}: {error}",
                accepted="a free port, or 0 for any that is",
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()
        self._ended: bool | None = None
        # A thread that still computes when Python takes itself apart would end it with a crash.
        atexit.register(self.close)

    @property
    def atlas(self) -> Atlas:
        """What is being looked at."""
        return self.session.now.answers.atlas

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def secret(self) -> str:
        """The secret part of the address."""
        return self._server.secret

    @property
    def room(self) -> str:
        """Where a browser is sent to from the address, and asks its questions with the cookie."""
        return f"http://127.0.0.1:{self.port}/{self._server.room}/"

    @property
    def cookie(self) -> str:
        """The header `Cookie` of those questions, for programs that are no browser."""
        return f"{self._server.cookie}={self._server.key}"

    @property
    def url(self) -> str:
        """The address to open: it gives access to anyone who knows it."""
        return f"http://127.0.0.1:{self.port}/{self.secret}/"

    def hold(
        self, *, browser: bool, view: str = "", ready: Callable[[str], None] | None = None
    ) -> bool:
        """Open the app in a browser, wait until it is interrupted or terminated, and close it;
        whether everything it did has ended."""
        address = f"{self.url}#{view}" if view else self.url
        file: RedirectFile | None = None
        with _ending() as ended:
            try:
                if ready is not None:
                    ready(address)
                if browser and not ended.is_set():
                    file = _opened(address)
                # With a limit, because without one an interrupt does not reach a wait on Windows.
                while self._ended is None and not ended.wait(0.5):
                    if file is not None and self._server.entered.is_set():
                        file.remove()
                        file = None
            finally:
                if file is not None:
                    file.remove()
                done = self.close()
        return done

    def close(self) -> bool:
        """Stop answering, and what is being computed; whether all of it has ended. What does not
        end is one long step, such as the loading of a model."""
        if self._ended is None:
            atexit.unregister(self.close)
            self.session.work.stop()
            answered = self._server.end()
            self._thread.join()
            self._ended = self.session.close() and answered
        return self._ended

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
    what: Trace | Seen | Weights | Atlas,
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
    answers; by default it is printed.
    """
    with App(what, tokens, queries=queries, batch=batch, port=port) as app:
        app.hold(browser=browser, view=view, ready=ready or _printed)


def _printed(address: str) -> None:
    # At once, also where the output goes to a file or a pipe.
    print(address, flush=True)


def _opened(address: str) -> RedirectFile | None:
    """Open the address in a browser; None where it cannot be handed over unseen."""
    try:
        file = RedirectFile(address)
    except OSError as error:
        # The address itself is printed, and stays out of the log.
        logger.warning("no browser was opened, as no private file could be written: %s", error)
        return None
    try:
        webbrowser.open(file.path.as_uri())
    except BaseException:
        file.remove()
        raise
    return file


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
