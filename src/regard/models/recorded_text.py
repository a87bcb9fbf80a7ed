"""A model that reads a text, written to a trace file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from regard.errors import RegardError
from regard.models.readers import OwnReader, Reader
from regard.seen import Seen
from regard.watching import Keep, watch

Progress = Callable[[int, int], None]
"""Called with the amount done, and the total."""


def record(
    reader: Reader,
    text: str,
    path: Path,
    *,
    keep: Keep = "traces",
    layers: Sequence[str] | None = None,
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> Seen:
    """Let a model read a text, and write what its attention did to a file.

    Traces are written as they come, so that a long text needs no more memory than reading it does.
    Whoever else records to that file meanwhile is refused.
    """
    _check(text, max_tokens)
    if isinstance(reader, OwnReader):
        return _record_own(reader, text, path, keep, layers, max_tokens, progress)
    ids = _ids(reader, text, max_tokens)
    spill = path if keep == "traces" else None
    watching = watch(
        reader.model, keep=keep, layers=layers, tokenizer=reader.tokenizer, spill=spill
    )
    with torch.no_grad(), reader.explained(), watching as seen, _Counting(reader, progress):
        reader.model(ids.to(next(reader.model.parameters()).device))
    if spill is None:
        seen.save(path, progress=progress)
    return seen


def _record_own(
    reader: OwnReader,
    text: str,
    path: Path,
    keep: Keep,
    layers: Sequence[str] | None,
    max_tokens: int | None,
    progress: Progress | None,
) -> Seen:
    if max_tokens is not None:
        text = reader.tokenizer.decode(reader.encode(text)[:max_tokens])
    with _Counting(reader, progress):
        seen = reader.run(text, keep=keep, layers=layers)
    seen.save(path, progress=progress)
    return seen


def _check(text: str, max_tokens: int | None) -> None:
    if max_tokens is not None and max_tokens < 1:
        raise RegardError("max_tokens counts tokens", got=str(max_tokens), accepted="1 or more")
    if not text.strip():
        raise RegardError(
            "there is nothing to read", got=repr(text[:20]), accepted="a text of a word or more"
        )


def _ids(reader: Reader, text: str, max_tokens: int | None) -> torch.Tensor:
    with reader.explained():
        ids: list[int] = reader.tokenizer(text, verbose=False)["input_ids"][:max_tokens]
    if not ids:
        raise RegardError("the tokenizer gave no tokens for the text", got=repr(text[:20]))
    if reader.longest is not None and len(ids) > reader.longest:
        raise RegardError(
            "the text is longer than the model can read",
            got=f"{len(ids)} tokens",
            accepted=f"{reader.longest}",
            do=f"read its beginning: --max-tokens {reader.longest}",
        )
    return torch.tensor([ids])


class _Counting:
    """Tells how many modules that hold no others have run, while a model runs."""

    def __init__(self, reader: Reader, progress: Progress | None) -> None:
        self.model, self.progress = reader.model, progress
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        leaves = [m for m in self.model.modules() if not any(m.children())]
        done = 0

        def count(*_: Any) -> None:
            nonlocal done
            done += 1
            if self.progress is not None:
                self.progress(min(done, len(leaves)), len(leaves))

        self._hooks = [leaf.register_forward_hook(count) for leaf in leaves]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
