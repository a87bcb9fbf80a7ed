"""The command `regard record`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.text import Text

from regard.commands.console import plain_console, progress_bar, shown_on
from regard.commands.named_subject import text_of
from regard.errors import RegardError
from regard.files import claimed
from regard.models.named_models import load
from regard.models.recorded_text import record as record_text
from regard.seen import shown
from regard.watching import Keep


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
        typer.Option(help="traces, which answer for every weight, or statistics of each head."),
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
        raise RegardError(
            "--keep says what to keep", got=repr(keep), accepted="traces or statistics"
        )
    words = text_of(text)
    with _ended_by_signals(), _claimed(out), progress_bar() as bar:
        if out.exists() and not force:
            raise RegardError(
                "there is a file of that name", got=str(out), do="choose another, or add --force"
            )
        task = bar.add_task("loading", total=None)
        reader = load(model, dtype=dtype, device=device, progress=shown_on(bar, task))
        bar.update(task, description="reading")
        seen = record_text(
            reader, words, out, keep=cast(Keep, keep), layers=layers, max_tokens=max_tokens,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    console = plain_console()
    far = f"{len(seen.tokens)} tokens" if seen.tokens else "a text and wrote another"
    console.print(Text(f"{seen.model} read {far}\n\n{seen}\n"), soft_wrap=True)
    size = shown(out.stat().st_size)
    told = f'{out} ({size}) holds the {keep}: regard.load("{out}") opens it'
    console.print(Text(told), soft_wrap=True)


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """The file is locked against other recordings."""
    with ExitStack() as held:
        try:
            held.enter_context(claimed(out))
        except OSError as error:
            raise RegardError(
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
