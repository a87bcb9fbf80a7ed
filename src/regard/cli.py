"""The command `regard`: what it does. How it is started is in `regard_command`."""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

import regard
from regard import cost_command, lab_command, masks
from regard.backends.triton import shipped
from regard.claims import claimed
from regard.models.opening import load
from regard.models.recording import record as record_text
from regard.seen import shown
from regard.view.app import App
from regard.view.console import PlainConsole
from regard.view.opening import first_view, why_not
from regard.view.showing import Look, Subject, Wanted, drawn, look, show
from regard.view.subjects import Spelling, subject_of, text_of
from regard.watching import Keep


class Explained(TyperGroup):
    """The boundary: a request that cannot be met ends in its explanation, not in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except regard.RegardError as error:
            typer.echo(f"regard: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Explained,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"regard {regard.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Attention for PyTorch that is fast and can be looked into."""


@app.command()
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
            help="Who reads the text: a model of this package, spelling (nothing is learned), a "
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
    numbers: Annotated[
        bool, typer.Option("--numbers", help="Numbers in the grid of heads, here.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Draw with ASCII and numbers, here.")
    ] = False,
    mask: Annotated[
        str,
        typer.Option(
            help="With spelling, who sees whom: others (all words but itself), causal, full, "
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
    if picture is None and (kind is not None or dark):
        raise regard.RegardError(
            "--kind and --dark say how a picture is drawn",
            got="no --picture",
            do="name the file to write: --picture attention.svg",
        )
    serving = port is not None or no_browser
    here = terminal or plain or numbers or call is not None
    if serving and here:
        raise regard.RegardError(
            "--port and --no-browser are about the app",
            got="an option that shows it here as well: --terminal, --plain, --numbers or --call",
            accepted="one of the two",
        )
    wanted = Wanted(layer, head, token, call, numbers, plain, dark, kind)
    writing = picture is not None or page is not None
    why = "" if serving or here or writing else why_not()
    in_app = serving or not (here or writing or why)
    with _bar() as bar:
        task = bar.add_task("looking", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        subject = subject_of(
            text, model, Spelling(mask, score, temperature), lambda _, *far: progress(*far)
        )
        this = None if in_app and picture is None else look(subject, wanted, progress)
        if picture is not None and this is not None:
            _draw(this, picture)
        if page is not None:
            from regard.view.page import page as write_page

            atlas = subject.atlas()
            view = first_view(subject, atlas, wanted)
            write_page(atlas, page, view=view, progress=progress)
    console = _console()
    if this is not None and (here or why):
        show(this, console)
    for path in filter(None, (picture, page)):
        console.print(Text(f"wrote {path} ({shown(path.stat().st_size)})"))
    if why:
        note = f"shown here, because {why}; --no-browser serves the app all the same"
        PlainConsole(stderr=True).print(Text(note, "dim"))
    if in_app:
        _serve(subject, wanted, port or 0, console, browser=not no_browser)


def _draw(this: Look, picture: Path) -> None:
    figure = drawn(this)
    # Imported late: matplotlib is an extra, and takes its time.
    from regard.view.ink import save

    save(figure, picture)


def _serve(subject: Subject, wanted: Wanted, port: int, console: Console, *, browser: bool) -> None:
    """The app, until it is interrupted."""
    atlas = subject.atlas()
    view = first_view(subject, atlas, wanted)

    def ready(address: str) -> None:
        # An address that is broken into lines cannot be clicked.
        console.print(Text(f"{subject.title}\n{address}"), soft_wrap=True)
        console.print(Text("open for this machine alone; Ctrl+C ends it", "dim"))

    with App(atlas, port=port, told=subject.told) as app:
        ended = app.hold(browser=browser, view=view, ready=ready)
    if not ended:
        # One step takes long and cannot be stopped. Python would take itself apart around it, and
        # crash; there is nothing left to put in order.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)


@app.command()
def record(
    model: Annotated[
        str,
        typer.Option(
            help="regard-small, regard-king-james, a folder that holds a Hugging Face model, or "
            "its name on the hub."
        ),
    ],
    text: Annotated[str, typer.Option(help="The file to read; - is standard input.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace file to write.")],
    keep: Annotated[
        str,
        typer.Option(help="traces, from which any weight can be had, or statistics of each head."),
    ] = "traces",
    layers: Annotated[
        list[str] | None,
        typer.Option(help="Only modules of this path; * matches anything. Can be given again."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Read only so many tokens.", show_default=False)
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="auto (CUDA where there is one), cpu, cuda.")
    ] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Let a model read a text, and keep what its attention did in a trace file.

    Weights are read from safetensors files only, and code that comes with a model is never run.
    """
    if keep not in ("traces", "statistics"):
        raise regard.RegardError(
            "--keep says what to keep", got=repr(keep), accepted="traces or statistics"
        )
    words = text_of(text)
    with _ended_by_signals(), _claimed(out), _bar() as bar:
        if out.exists() and not force:
            raise regard.RegardError(
                "there is a file of that name", got=str(out), do="choose another, or add --force"
            )
        task = bar.add_task("loading", total=None)
        reader = load(model, dtype=dtype, device=device)
        bar.update(task, description="reading")
        seen = record_text(
            reader, words, out, keep=cast(Keep, keep), layers=layers, max_tokens=max_tokens,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    console = _console()
    far = f"{len(seen.tokens)} tokens" if seen.tokens else "a text and wrote another"
    console.print(Text(f"{seen.model} read {far}\n\n{seen}\n"))
    size = shown(out.stat().st_size)
    console.print(Text(f'{out} ({size}) holds the {keep}: regard.load("{out}") opens it'))


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Nobody else records to a file meanwhile."""
    with ExitStack() as held:
        try:
            held.enter_context(claimed(out))
        except OSError as error:
            raise regard.RegardError(
                "the file cannot be written",
                got=f"{out}: {error.strerror or error}",
                accepted="a path in a folder that exists, can be written to and has room",
                do="choose another path; nothing was written or replaced",
            ) from None
        yield


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """What ends a process from outside ends it as an exception does: what was begun is removed."""

    def end(number: int, _: object) -> None:
        name = signal.Signals(number).name
        typer.echo(f"regard: ended by {name}; nothing was written or replaced", err=True)
        raise SystemExit(128 + number)

    kinds = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    here = threading.current_thread() is threading.main_thread()
    before = {
        kind: signal.signal(kind, end)
        for kind in kinds
        if here and signal.getsignal(kind) == signal.SIG_DFL
    }
    try:
        yield
    finally:
        for kind, own in before.items():
            signal.signal(kind, own)


app.command()(cost_command.cost)
app.command()(lab_command.lab)


@app.command()
def doctor(
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure this machine, for regard cost --device here."),
    ] = False,
) -> None:
    """Versions, devices, and which backends run here and why the others do not."""
    console = _console()
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, fact in _facts():
        facts.add_row(Text(name), Text(fact))
    console.print(facts)
    for device, dtype in _devices():
        q = torch.zeros(1, 8, 1024, 64, device=device, dtype=dtype)
        plans = [
            regard.plan(q, q, q, mask=masks.causal(), statistics=statistics)
            for statistics in (False, True)
        ]
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
        for heading in ("backend", "attention", "trace"):
            table.add_column(heading)
        for name in regard.dispatch.BACKENDS:
            table.add_row(name, *(Text(_verdict(plan, name)) for plan in plans))
        console.print(Text(f"\n{plans[0].call.removeprefix('attention of ')}"))
        console.print(table)
        loops = {f"inner loop of {p.backend}: {p.inner_loop}": p for p in plans if p.inner_loop}
        for line in loops:
            console.print(Text(line))
    if measure:
        console.print(Text(f"\n{cost_command.measure_here()}"))


def _console() -> Console:
    # A terminal that cannot encode a character shows a question mark, not a traceback.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return PlainConsole()


def _bar() -> Progress:
    """Progress on standard error, gone when the work is done."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip


def _facts() -> list[tuple[str, str]]:
    found = [
        ("regard", regard.__version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
    ]
    try:
        found.append(("triton", installed("triton")))
    except PackageNotFoundError:
        found.append(("triton", "not installed"))
    found.append(("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores"))
    gpus = [
        f"{p.name} ({p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}, "
        f"{shipped.count(10 * p.major + p.minor)} kernels come compiled)"
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*found, ("devices", "\n".join(["cpu", *gpus, *mps]))]


def _devices() -> list[tuple[str, torch.dtype]]:
    cuda = [("cuda", torch.bfloat16)] if torch.cuda.is_available() else []
    mps = [("mps", torch.float32)] if torch.backends.mps.is_available() else []
    return [("cpu", torch.float32), *cuda, *mps]


def _verdict(plan: regard.Plan, name: str) -> str:
    if plan.backend == name:
        return "runs"
    return "; ".join(plan.refusals[name]) or "could, but ranks lower"
