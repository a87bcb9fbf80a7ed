"""A model reads a text, or goes on with it: what was seen, and what its places are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.errors import RegardError
from regard.models.readers import OwnTranslator, Reader
from regard.models.tokenizer import MARK_TEXT
from regard.seen import Seen
from regard.view.atlas import Atlas
from regard.view.subjects.joined_steps import JoinedSteps
from regard.watching import watch

SPELLING = "spelling"
"""The name that stands for no model: words are compared by their spelling."""
Tell = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and of how much: 0 if that is not known. Raises
if the work is no longer wanted."""
Names = tuple[list[str], list[str]]
"""What the queries of a layer are called, and what its keys are."""


class Known(NamedTuple):
    """A head of which it is known what it does."""

    kind: str
    path: str
    head: int


@dataclass(frozen=True)
class TextInfo:
    """What is known of a text that was read: what it says, who read it, what that wrote, and which
    of its heads do what."""

    text: str = ""
    model: str = ""
    wrote: str = ""
    heads: tuple[Known, ...] = ()
    ids: tuple[int, ...] = ()
    """The tokens that the model read or wrote, if it predicts the next one of each place."""
    source: tuple[int, ...] = ()
    """Those of the text that it read meanwhile, if it writes another."""
    silent: str = ""
    """Why the model predicts nothing, if it does not."""
    badges: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By the path of a layer, a word for each head, as the model's card has them."""


@dataclass(frozen=True, eq=False)
class Run:
    """What was seen of one run over one text."""

    seen: Seen
    wrote: str = ""
    """The text that followed, if any was asked for."""
    names: dict[str, Names] = field(default_factory=dict)
    """By path of the layer, in which * matches anything, where there are two texts."""
    starts: dict[str, list[int]] = field(default_factory=dict)
    """The first query of each step of writing, by path of the layer."""
    ids: tuple[int, ...] = ()
    """All tokens that were read or written, in order."""
    source: tuple[int, ...] = ()
    """The tokens of the other text, where there are two."""

    def told(self, reader: Reader, text: str) -> TextInfo:
        """What is known of the text."""
        silent = reader.why_silent()
        ids, source = ((), ()) if silent else (self.ids, self.source)
        return TextInfo(
            text, reader.name, self.wrote, known_heads(reader), ids, source, silent,
            known_badges(reader),
        )  # fmt: skip

    def atlas(self, model: str) -> Atlas:
        """The maps of all layers, their places named."""
        atlas = Atlas.of(self.seen)
        for of in atlas.maps:
            if len(of.calls) == 1:
                of.steps = self.starts.get(of.name, ())
        return named(atlas, model, self.names)


def named(atlas: Atlas, model: str, names: dict[str, Names]) -> Atlas:
    """The same atlas, with the name of the model and those of its places."""
    atlas.model = model or atlas.model
    for of in atlas.maps:
        found = names_of(of.name, names)
        if found is not None:
            of.queries, of.keys = found
    return atlas


def names_of(path: str, names: dict[str, Names]) -> Names | None:
    """What the queries and keys of a layer are called, if that was said."""
    return next((found for pattern, found in names.items() if fnmatch(path, pattern)), None)


def run(reader: Reader, text: str, tokens: int, tell: Tell) -> Run:
    """Let a model read a text and go on for so many tokens, which may be none.

    A model that reads one text and writes another writes all of it, or at most so many tokens.
    """
    if isinstance(reader, OwnTranslator):
        return _translated(reader, text, tokens, tell)
    with counted(reader.model, tokens, tell), tokens_given(reader.model) as ids:
        if not tokens:
            return Run(reader.run(text), ids=tuple(ids))
        with watch(reader.model, keep="traces", tokenizer=reader.tokenizer) as seen:
            fold = JoinedSteps(seen)
            hook = reader.model.register_forward_hook(lambda *_: fold())
            try:
                wrote = reader.generate(text, tokens)
            finally:
                hook.remove()
    return Run(seen, wrote, starts=fold.starts, ids=tuple(ids))


def _translated(reader: OwnTranslator, text: str, tokens: int, tell: Tell) -> Run:
    most = reader.model.config.longest - 1
    with counted(reader.model, tokens, tell, reads_first=False):
        target, ended = reader.translation(text, min(tokens or most, most))
        # Half characters take more tokens when they are read again.
        while len(reader.tokenizer.encode(target)) > most:
            target = target[:-1]
        seen = reader.run(text, target=target, ended=ended)
    ids = (reader.targets(target, ended=ended), reader.ids(text))
    source, written = reader.read(text), reader.writes(target, ended=ended)
    given = [MARK_TEXT, *written[:-1]]
    names = {
        "encoder.*": (source, source),
        "decoder.*.own": (given, given),
        "decoder.*.memory": (written, source),
    }
    return Run(seen, target, names, {}, *(tuple(each[0].tolist()) for each in ids))


def known_heads(reader: Reader) -> tuple[Known, ...]:
    """For each thing that heads do, the head that does it most by the model's card: those of which
    there is most to see first."""
    if "heads" not in reader.card:
        return ()
    path = "decoder.{}.memory" if isinstance(reader, OwnTranslator) else "blocks.{}.attention"
    measured = reader.card["heads"]
    found: list[Known] = []
    for kind in KINDS:
        # One head may be the first of two kinds: it stands for the first of them alone.
        heads = (each for each in measured.get(kind, ()) if each["score"] >= PLAIN)
        named = (Known(kind, path.format(each["layer"]), each["head"]) for each in heads)
        taken = {(known.path, known.head) for known in found}
        found.extend([known for known in named if (known.path, known.head) not in taken][:1])
    return tuple(found)


def known_badges(reader: Reader) -> dict[str, list[str]]:
    """What the heads of a model do over many texts, by its card; nothing where it does not say."""
    if "badges" not in reader.card or not isinstance(reader.card["badges"], dict):
        return {}
    return {
        path: words
        for path, words in reader.card["badges"].items()
        if isinstance(words, list) and all(isinstance(word, str) for word in words)
    }


@contextmanager
def counted(
    model: nn.Module, tokens: int, tell: Tell, *, reads_first: bool = True
) -> Iterator[None]:
    """Tell how far a model is: how much of its first run is done, then how many tokens it wrote."""
    leaves = [module for module in model.modules() if not any(module.children())]
    steps = runs = 0

    def step(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if runs or not reads_first:
            tell("writing", min(runs, tokens) if tokens else runs, tokens)
        else:
            tell("reading", min(steps, len(leaves)), len(leaves))

    def ran(*_: Any) -> None:
        nonlocal runs
        runs += 1

    hooks = [leaf.register_forward_hook(step) for leaf in leaves]
    hooks.append(model.register_forward_hook(ran))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def tokens_given(model: nn.Module) -> Iterator[list[int]]:
    """The tokens that a model is given, one run after the other."""
    ids: list[int] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("input_ids")
        if isinstance(given, Tensor) and given.ndim == 2:
            new = given[0].tolist()
            # A model without a cache is given all of them again.
            ids[:] = new if ids and new[: len(ids)] == ids else ids + new

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield ids
    finally:
        hook.remove()


def check_words(text: object, tokens: object) -> tuple[str, int]:
    """A text to read and how far to go on with it, or the reason why that cannot be."""
    if not isinstance(text, str) or not text.strip():
        raise RegardError("there is nothing to read", accepted="a text of a word or more")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= MOST:
        raise RegardError(
            "the number of tokens to generate is out of range",
            got=repr(tokens),
            accepted=f"0 to {MOST}",
        )
    return text, tokens


KINDS = ("induction", "alignment", "previous", "first")
PLAIN = 0.2
"""The mean weight from which on it is plain what a head does."""
MOST = 2000
"""Tokens that are written at once, at most."""
