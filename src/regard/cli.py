"""The command `regard`: what it does. How it is started is in `regard_command`."""

from __future__ import annotations

import errno
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import regard
from regard.commands.cost import cost
from regard.commands.doctor import doctor
from regard.commands.faithfulness import faithfulness
from regard.commands.heads import heads
from regard.commands.lab import lab
from regard.commands.record import record
from regard.commands.scan import scan
from regard.commands.view import view


class Explained(TyperGroup):
    """The boundary: a request that cannot be met ends in its explanation, not in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except regard.RegardError as error:
            typer.echo(f"regard: {error}", err=True)
            raise typer.Exit(2) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            typer.echo(f"regard: what it says cannot be written: {error.strerror}", err=True)
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


for _command in (view, record, heads, faithfulness, scan, cost, lab, doctor):
    app.command()(_command)
