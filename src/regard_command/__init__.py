"""The command `regard` as a shell starts it.

`import regard` takes the seconds that `import torch` takes. Help, the version, completion and
mistakes need neither, so this package, which is beside `regard` and imports nothing of it, answers
them; every command is handed to `regard.cli`.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from importlib.metadata import version
from typing import Annotated

import typer

COMMANDS = {
    "view": "See attention: over a sentence, in a trace file, or while a model reads.",
    "record": "Let a model read a text, and keep what its attention did in a trace file.",
    "heads": "What each head of a model does: looks at the token before, at what followed, …",
    "faithfulness": "Whether attention weights point at what decided the model's next token.",
    "scan": "Statistics of every head of a model over a corpus of texts.",
    "cost": "What reading a context with a model costs: FLOPs, bytes, memory, cache, time at best.",
    "lab": "Small experiments that show why attention is as it is.",
    "doctor": "Versions, devices, and which backends run here and why the others do not.",
}
"""What each command does, as its own help begins."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command: here, or in `regard.cli` if one of its commands is meant."""
    # What a terminal or a pipe cannot encode is shown as a question mark, not as a traceback.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if any(word in COMMANDS for word in _words()):
        # PyTorch says when it is imported that there is no numpy. Nothing here needs it.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
        from regard.cli import app as whole

        whole(prog_name="regard")
    else:
        app(prog_name="regard")


def _words() -> list[str]:
    """What the command is asked; what a shell asks to be completed, without its last word."""
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    if "_REGARD_COMPLETE" in os.environ:
        return line.split(" ")[1:-1]
    return sys.argv[1:2]


def _say_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"regard {version('regard')}")
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Attention for PyTorch that is fast and can be looked into."""


def _elsewhere() -> None:
    raise AssertionError("a command is run by regard.cli")


for _name, _about in COMMANDS.items():
    app.command(_name, help=_about)(_elsewhere)
