"""The command `regard faithfulness`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from regard.commands.console import plain_console, progress_bar, shown_on
from regard.commands.named_subject import SMALL, STORY, text_of
from regard.errors import RegardError
from regard.models.named_models import load
from regard.models.readers import OwnTranslator


def faithfulness(
    text: Annotated[
        list[str] | None,
        typer.Argument(help="The text to read; an example without it.", show_default=False),
    ] = None,
    texts: Annotated[
        str | None,
        typer.Option(
            help="A file with a text in each line, instead; - is standard input.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="The model: regard-small, a folder that holds a Hugging Face model, or its name "
            "on the hub."
        ),
    ] = SMALL,
    softmax: Annotated[
        str,
        typer.Option(
            help="Cut edges before softmax, so that their weight goes to other keys, or after."
        ),
    ] = "before",
    cuts: Annotated[
        str,
        typer.Option(help="Cut the edges of all later tokens (token), or of the last one (last)."),
    ] = "token",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write a page (.html) or numbers (.json) there."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto (CUDA where there is one), cpu, cuda.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="The seed of random numbers.")] = 0,
) -> None:
    """Whether attention weights point at what decided the model's next token.

    Each token's edges are cut, and scores of tokens are compared with what that does: weights,
    value norms, rollout and gradients, beside position alone and chance.
    """
    if out is not None and out.suffix not in (".html", ".json"):
        raise RegardError(
            "--out chooses the format by the ending of its name",
            got=str(out),
            accepted=".html or .json",
        )
    # Imported when it is asked for: other commands need not wait for it.
    from regard.interpret import faithfulness as measured

    read = _texts(text, texts)
    how: dict[str, Any] = {"softmax": softmax, "cuts": cuts, "seed": seed}
    with progress_bar() as bar:
        task = bar.add_task("loading", total=None)
        reader = load(model, device=device, progress=shown_on(bar, task))
        if isinstance(reader, OwnTranslator):
            raise RegardError(
                "a model that reads one text and writes another has no next token of its own",
                got=repr(model),
                accepted="causal language models",
            )
        found = measured(
            reader.model,
            [reader.ids(one) for one in read],
            words=[reader.read(one) for one in read],
            progress=lambda done, total: bar.update(
                task, description="cutting", completed=done, total=total
            ),
            **how,
        )
    console = plain_console()
    console.print(Text(repr(found)), soft_wrap=True)
    if out is not None:
        if out.suffix == ".html":
            found.page(out)
        else:
            found.write(out)
        console.print(Text(f"wrote {out}"), soft_wrap=True)


def _texts(text: list[str] | None, file: str | None) -> list[str]:
    if text and file is not None:
        raise RegardError(
            "give a text or a file of texts, not both", got="both", do="leave out one of them"
        )
    if file is not None:
        lines = [line for line in text_of(file).splitlines() if line.strip()]
        if not lines:
            raise RegardError("there is no text in the file", got=file)
        return lines
    return [" ".join(text)] if text else [STORY]
