"""The command `regard view`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import typer
from rich.console import Console
from rich.text import Text

from regard.commands.console import plain_console, progress_bar, shown_on
from regard.commands.first_view import first_view, why_not
from regard.commands.named_subject import subject_of
from regard.errors import RegardError
from regard.seen import shown
from regard.view.subjects import Look, Spelling, Subject, ViewOptions, look
from regard.view.terminal import PlainConsole, show
from regard.view.web import App
from regard.view.web import page as write_page


def view(
    text: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to look at: a text, a file of text, a trace file, or - for standard input.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model that reads: one of this package, spelling (nothing is learned), a "
            "folder that holds a Hugging Face model, or its name on the hub. Without it, "
            "regard-small if it is there and the text is short, else spelling.",
            show_default=False,
        ),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            help="The layer, from 0, or its path; * matches anything.", show_default=False
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(help="The head, from 0, or mean: that of all heads.", show_default=False),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(help="The token to look at, or its number from 1.", show_default=False),
    ] = None,
    call: Annotated[
        int | None,
        typer.Option(help="Which call, where a layer has several.", show_default=False),
    ] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show it here, instead of in the app.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            help="Serve the app on this port, not on any that is free.", show_default=False
        ),
    ] = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Serve the app, and open no browser.")
    ] = False,
    compare: Annotated[
        str | None,
        typer.Option(help="Another text, to compare with in the app.", show_default=False),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write a .png, .svg or .pdf.", show_default=False)
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Write one HTML file of all layers and heads.", show_default=False),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="The picture: map, arcs (of a token), heads or entropy (by layer). Without it, "
            "arcs where a token is named, else a map.",
            show_default=False,
        ),
    ] = None,
    dark: Annotated[bool, typer.Option("--dark", help="A picture for a dark page.")] = False,
    width: Annotated[
        float | None, typer.Option(help="How wide the picture is, in millimetres.")
    ] = None,
    numbers: Annotated[
        bool, typer.Option("--numbers", help="Numbers in the grid of heads, here.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Draw with ASCII and numbers, here.")
    ] = False,
    mask: Annotated[
        str,
        typer.Option(
            help="With spelling, the mask: others (all words but itself), causal, full, "
            "window:N (itself and N before it), or several with commas between."
        ),
    ] = Spelling.mask,
    score: Annotated[
        str,
        typer.Option(help="With spelling, how two words are compared: scaled_dot, dot, cosine."),
    ] = Spelling.score,
    temperature: Annotated[
        float, typer.Option(help="With spelling, what scores are divided by: lower is sharper.")
    ] = Spelling.temperature,
) -> None:
    """See attention: over a sentence, in a trace file, or while a model reads.

    It opens as a web page on this machine, which goes on until Ctrl+C; or here, as text.
    With --model spelling, words are compared by their spelling, so that "attends" and "attention"
    find each other. There is nothing learned behind that: what you see is the mechanism.
    """
    if picture is None and (kind is not None or dark or width is not None):
        raise RegardError(
            "--kind, --dark and --width say how a picture is drawn",
            got="no --picture",
            do="name the file to write: --picture attention.svg",
        )
    serving = port is not None or no_browser
    here = terminal or plain or numbers or call is not None
    if serving and here:
        raise RegardError(
            "--port and --no-browser are about the app",
            got="an option that shows it here as well: --terminal, --plain, --numbers or --call",
            accepted="one of the two",
        )
    if compare is not None and (here or picture is not None or page is not None):
        raise RegardError(
            "two texts are compared in the app",
            got="--compare, and an option that shows or writes it elsewhere",
            do="leave out --terminal, --plain, --numbers, --call, --picture and --page",
        )
    if picture is not None:
        # Before the work: matplotlib is an extra, and may be missing.
        from regard.view.pictures import theme

        theme.format_of(picture)
    wanted = ViewOptions(layer, head, token, call, numbers, plain, dark, kind)
    writing = picture is not None or page is not None
    why = "" if serving or here or writing else why_not()
    in_app = serving or not (here or writing or why)
    with progress_bar() as bar:
        task = bar.add_task("looking", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        spelling = Spelling(mask, score, temperature)
        subject = subject_of(text, model, spelling, shown_on(bar, task))
        bar.update(task, description="looking", completed=0, total=None)
        this = None if in_app and picture is None else look(subject, wanted, progress)
        if picture is not None and this is not None:
            _draw(this, picture, width)
        if page is not None:
            atlas = subject.atlas()
            view = first_view(subject, atlas, wanted)
            bar.update(task, description=f"writing {page.name}", completed=0, total=None)
            write_page(atlas, page, view=view, progress=progress)
    console = plain_console()
    if this is not None and (here or why):
        show(this, console)
    for path in filter(None, (picture, page)):
        console.print(Text(f"wrote {path} ({shown(path.stat().st_size)})"))
    if why:
        note = f"shown here, because {why}; --no-browser serves the app all the same"
        PlainConsole(stderr=True).print(Text(note, "dim"))
    if in_app:
        beside = {} if compare is None else {"view": "compare", "other": compare}
        _serve(subject, wanted, port or 0, console, browser=not no_browser, beside=beside)


def _draw(this: Look, picture: Path, width: float | None) -> None:
    # Imported late: matplotlib is an extra, and takes its time.
    from regard.view.pictures.subject_picture import drawn, save

    save(drawn(this), picture, width=width)


def _serve(
    subject: Subject,
    wanted: ViewOptions,
    port: int,
    console: Console,
    *,
    browser: bool,
    beside: dict[str, str],
) -> None:
    """The app, until it is interrupted."""
    atlas = subject.atlas()
    # The first of two words for the view holds.
    view = "&".join(filter(None, (urlencode(beside), first_view(subject, atlas, wanted))))

    def ready(address: str) -> None:
        # An address that is broken into lines cannot be clicked.
        console.print(Text(f"{subject.title}\n{address}"), soft_wrap=True)
        console.print(Text("open for this machine alone; Ctrl+C ends it", "dim"))

    with App(atlas, port=port, told=subject.told, reader=subject.reader) as app:
        ended = app.hold(browser=browser, view=view, ready=ready)
    if not ended:
        # One step takes long and cannot be stopped. Python would take itself apart around it, and
        # crash; there is nothing left to put in order.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
