"""The command `regard`."""

from __future__ import annotations

import math
import os
import platform
import sys
from functools import reduce
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.util import find_spec
from operator import and_
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
from regard import masks, scores
from regard.masks import Mask
from regard.scores import Score
from regard.view import heat_map, shaded
from regard.view.labels import clean
from regard.view.spelling import vectors, words
from regard.view.terminal import colourless
from regard.watching.memory import shown
from regard.watching.watcher import Keep

SENTENCE = "A word attends to words like it: attention reads what readers read and reread."
TOKEN = "reread"
TEMPERATURE = 6.0


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
            help="The words to look at; - reads them from standard input.", show_default=False
        ),
    ] = None,
    mask: Annotated[
        str,
        typer.Option(
            help="Who sees whom: others (all words but itself), causal, full, window:N (itself and "
            "N before it), or several with commas between."
        ),
    ] = "others",
    score: Annotated[
        str, typer.Option(help="How two words are compared: scaled_dot, dot or cosine.")
    ] = "scaled_dot",
    temperature: Annotated[
        float, typer.Option(help="What scores are divided by: lower is sharper.")
    ] = TEMPERATURE,
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
    chosen_mask, chosen_score = _mask(mask), _score(score, temperature)
    if token is None and not text:
        token = TOKEN
    query = None if token is None else _place(token, tokens)
    x = vectors(tokens)
    unit = {"scaled_dot": 1 / math.sqrt(x.shape[-1]), "dot": 1.0}.get(score)
    scale = None if unit is None else unit / temperature
    t = regard.trace(x, x, x, mask=chosen_mask, score=chosen_score, scale=scale)
    query = _leaning(t) if query is None else query
    console = _console()
    plain = plain or colourless(console)
    bold, dim = ("", "") if plain else ("bold", "dim")
    many = f"{len(tokens)} word{'s' if len(tokens) > 1 else ''}"
    console.print(Text(f"{many} compared by their spelling; no trained model", bold))
    how = f"score={chosen_score!r}" + ("" if score == "cosine" else f" / {temperature:g}")
    console.print(Text(f"mask={chosen_mask!r}, {how}, backend={t.backend}\n", dim))
    console.print(heat_map(t, tokens, plain=plain))
    asked = f"what '{clean(tokens[query])}' (word {query + 1}) looks at"
    console.print(Text(f"\n{asked}, in percent{'' if plain else ', brightest where most'}", bold))
    console.print(shaded(t, tokens, query, plain=plain))


@app.command()
def record(
    model: Annotated[
        str, typer.Option(help="A folder that holds a Hugging Face model, or its name on the hub.")
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
    if out.exists() and not force:
        raise regard.RegardError(
            "there is a file of that name", got=str(out), do="choose another, or add --force"
        )
    if keep not in ("traces", "statistics"):
        raise regard.RegardError(
            "--keep says what to keep", got=repr(keep), accepted="traces or statistics"
        )
    words = _text(text)
    if find_spec("transformers") is None:
        raise regard.RegardError(
            "models are loaded with transformers, which is not installed",
            do="pip install regard[huggingface]",
        )
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("loading", total=None)
        # Imported late: importing transformers takes seconds.
        from regard.models.loading import load_model
        from regard.models.recording import record as read

        loaded = load_model(model, dtype=dtype, device=device)
        bar.update(task, description="reading")
        seen = read(
            loaded, words, out, keep=cast(Keep, keep), layers=layers, max_tokens=max_tokens,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    console = _console()
    tokens = seen.tokens or []
    console.print(Text(f"{seen.model} read {len(tokens)} tokens\n\n{seen}\n"))
    size = shown(out.stat().st_size)
    console.print(Text(f'{out} ({size}) holds the {keep}: regard.load("{out}") opens it'))


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
        for plan in plans:
            if plan.inner_loop:
                console.print(Text(f"inner loop of {plan.backend}: {plan.inner_loop}"))


def _console() -> Console:
    # A terminal that cannot encode a character shows a question mark, not a traceback.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


def _text(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise regard.RegardError(
            "the text cannot be read",
            got=f"{name}: {error}",
            accepted="a file of UTF-8 text, or - for standard input",
        ) from None


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


def _mask(names: str) -> Mask | None:
    """A mask by name; several names, with commas between, must all allow a pair."""
    chosen = [mask for mask in map(_one_mask, names.split(",")) if mask is not None]
    return reduce(and_, chosen) if chosen else None


def _one_mask(name: str) -> Mask | None:
    kind, _, size = name.strip().partition(":")
    if kind == "window" and size.isdecimal():
        return masks.window(int(size))
    if size or kind not in ("others", "causal", "full"):
        raise regard.RegardError(
            "unknown mask",
            got=repr(name),
            accepted="others, causal, full or window:N, or several with commas between",
            do="window:3 lets each word see itself and the three before it",
        )
    return {"others": ~masks.window(0), "causal": masks.causal(), "full": None}[kind]


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
