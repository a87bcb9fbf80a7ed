"""The command `regard`."""

from __future__ import annotations

import math
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

import regard
from regard import masks, scores
from regard.masks import Mask
from regard.scores import Score
from regard.view import heat_map, shaded
from regard.view.labels import clean
from regard.view.spelling import vectors, words

SENTENCE = "A word attends to words like it: attention reads what readers read and reread."
TOKEN = "reread"
TEMPERATURE = 10.0


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
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {regard.__version__}")
        raise typer.Exit


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
            help="The words to look at; - reads them from standard input.", show_default=False
        ),
    ] = None,
    mask: Annotated[
        str, typer.Option(help="Who sees whom: causal, full, or window:N (N words before it).")
    ] = "causal",
    score: Annotated[
        str, typer.Option(help="How two words are compared: scaled_dot, dot or cosine.")
    ] = "scaled_dot",
    temperature: Annotated[
        float, typer.Option(help="What scores are divided by: lower is sharper.")
    ] = TEMPERATURE,
    others: Annotated[bool, typer.Option("--others", help="Hide each word from itself.")] = False,
    token: Annotated[
        str | None,
        typer.Option(help="The word to read the text with, or its number.", show_default=False),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Draw with ASCII and numbers.")] = False,
) -> None:
    """See attention over a sentence, in the terminal.

    Words are compared by their spelling, so that "attends" and "attention" find each other. There
    is no trained model behind it: what you see is the mechanism.
    """
    tokens = _words(text)
    chosen_mask, chosen_score = _mask(mask, others), _score(score, temperature)
    query = None if text and token is None else _place(token or TOKEN, tokens)
    x = vectors(tokens)
    scale = None if score == "cosine" else _scale(score, x.shape[-1]) / temperature
    t = regard.trace(x, x, x, mask=chosen_mask, score=chosen_score, scale=scale)
    query = _leaning(t) if query is None else query
    console = _console()
    console.print(Text(f"{len(tokens)} words compared by their spelling; no trained model"))
    how = f"score={chosen_score!r}" + ("" if score == "cosine" else f" / {temperature:g}")
    console.print(Text(f"mask={chosen_mask!r}, {how}, backend={t.backend}\n"))
    console.print(heat_map(t, tokens, plain=plain))
    console.print(
        Text(f"\nwhat {clean(tokens[query])!r} (word {query + 1}) looks at, in percent\n")
    )
    console.print(shaded(t, tokens, query, plain=plain))


@app.command()
def doctor() -> None:
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


def _console() -> Console:
    # A terminal that cannot encode a character shows a question mark, not a traceback.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


def _words(text: list[str] | None) -> list[str]:
    if text == ["-"]:
        text = [sys.stdin.read()]
    found = words(SENTENCE if not text else " ".join(text))
    if not found:
        raise regard.RegardError(
            "there is no word in the text",
            got=repr(" ".join(text or [])),
            accepted="at least one word",
            do='try: regard view "the words you care about"',
        )
    return found


def _mask(name: str, others: bool) -> Mask | None:
    kind, _, size = name.partition(":")
    alone = ~masks.window(0)
    if name == "full":
        return alone if others else None
    if name == "causal":
        chosen = masks.causal()
    elif kind == "window" and size.isdecimal():
        chosen = masks.window(int(size))
    else:
        raise regard.RegardError(
            "unknown mask",
            got=repr(name),
            accepted="causal, full or window:N",
            do="window:3 shows each word and the three before it",
        )
    return chosen & alone if others else chosen


def _score(name: str, temperature: float) -> Score:
    if not 0 < temperature < float("inf"):
        raise regard.RegardError(
            "temperature divides the scores", got=f"{temperature:g}", accepted="a number above 0"
        )
    if name == "cosine":
        return scores.cosine(temperature)
    if name not in ("scaled_dot", "dot"):
        raise regard.RegardError(
            "unknown score", got=repr(name), accepted="scaled_dot, dot or cosine"
        )
    return scores.dot() if name == "dot" else scores.scaled_dot()


def _scale(score: str, width: int) -> float:
    return 1.0 if score == "dot" else 1 / math.sqrt(width)


def _place(token: str, tokens: list[str]) -> int:
    """The last place of a word: under a causal mask it is the one that saw most."""
    places = [i for i, word in enumerate(tokens) if word.casefold() == token.casefold()]
    if places:
        return places[-1]
    if token.isdecimal() and 1 <= int(token) <= len(tokens):
        return int(token) - 1
    raise regard.RegardError(
        "--token is not in the text",
        got=repr(token),
        accepted=f"a word of the text, or a number from 1 to {len(tokens)}",
        do="words: " + " ".join(clean(word) for word in tokens[:20]),
    )


def _leaning(t: regard.Trace) -> int:
    """The query that gives most to a single other word."""
    top = t.top(2)
    own = torch.arange(len(top.indices))[:, None]
    return int(torch.where(top.indices == own, 0.0, top.values).amax(-1).argmax())


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
        f"{p.name} ({p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor})"
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    return [*found, ("devices", "\n".join(["cpu", *gpus]))]


def _devices() -> list[tuple[str, torch.dtype]]:
    cuda = [("cuda", torch.bfloat16)] if torch.cuda.is_available() else []
    return [("cpu", torch.float32), *cuda]


def _verdict(plan: regard.Plan, name: str) -> str:
    if plan.backend == name:
        return "runs"
    return "; ".join(plan.refusals[name]) or "could, but ranks lower"
