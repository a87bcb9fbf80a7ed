"""What of a subject is wanted: all that was seen of a model, or one head of it, and a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from regard.errors import RegardError
from regard.seen import Seen
from regard.traces import Trace
from regard.view.atlas import (
    Choice,
    Head,
    HeadFigures,
    choose,
    clean,
    head_figures,
    layer_of,
    only_statistics,
    refuse_places,
)
from regard.view.subjects.model_runs import names_of
from regard.view.subjects.subject import Subject

KINDS = ("map", "arcs", "heads", "entropy")


@dataclass(frozen=True)
class ViewOptions:
    """What of a model is to be shown; None where the command did not say."""

    layer: str | None = None
    head: str | None = None
    token: str | None = None
    call: int | None = None
    numbers: bool = False
    plain: bool = False
    dark: bool = False
    kind: str | None = None


class Place(NamedTuple):
    """Where a token stands among the queries and among the keys. One of two texts is only among
    either; one of a single text may be older than all queries."""

    query: int | None
    key: int | None


NOWHERE = Place(None, None)


@dataclass(frozen=True, eq=False)
class Look:
    """All that is needed to show a subject, settled: what takes time is done, and nothing that was
    asked for is missing."""

    subject: Subject
    wanted: ViewOptions
    found: HeadFigures | None
    """Of every head, where they are shown."""
    chosen: Choice | None
    """None where only statistics were kept."""
    place: Place = NOWHERE
    """The token that is looked at."""
    why: str = ""
    """Why this head, if nobody chose it."""


def look(
    subject: Subject, wanted: ViewOptions, progress: Callable[[int, int], None] | None = None
) -> Look:
    """What of a subject is wanted, or the reason why it cannot be shown."""
    alone = only_statistics(subject.what)
    if alone:
        refuse_parts(wanted)
    usual = "heads" if alone else "map" if wanted.token is None else "arcs"
    kind = wanted.kind or usual
    if kind not in KINDS:
        raise RegardError("unknown kind of picture", got=repr(kind), accepted=", ".join(KINDS))
    wanted = replace(wanted, kind=kind)
    whole = isinstance(subject.what, Seen) and wanted.layer is None and wanted.head is None
    counted = whole or wanted.numbers or kind in ("heads", "entropy")
    found = head_figures(subject.what, progress) if counted else None
    if whole and found is not None and not found.normalised:
        return Look(subject, wanted, found, None)
    wanted = chosen_head(subject, wanted, found if whole else None)
    chosen = pick(subject, wanted)
    why = ", the sharpest that looks past the first token" if whole else ""
    place = placed(subject, wanted, chosen.keys, chosen.queries)
    return Look(subject, wanted, found, chosen, place, why)


def refuse_parts(wanted: ViewOptions) -> None:
    """Refuse what only weights could show, where none were kept."""
    asked = {"--layer": wanted.layer, "--head": wanted.head, "--token": wanted.token}
    wrong = [f"{name} {given}" for name, given in asked.items() if given is not None]
    if wanted.call is not None:
        wrong.append(f"--call {wanted.call}")
    if wrong:
        raise refuse_places(", ".join(wrong))


def chosen_head(subject: Subject, wanted: ViewOptions, found: HeadFigures | None) -> ViewOptions:
    """A layer and a head where the command named none, or only one of the two.

    With the numbers of all heads: the sharpest that looks past the first token, which is the one
    with the least entropy and sink together. Of a model that reads one text and writes another, one
    that looks from the one into the other.
    """
    if found is not None:
        across = _across(subject)
        both = [
            (entropy + sink, layer, head)
            for layer, rows in enumerate(zip(found.entropy, found.sink, strict=True))
            if not across or layer in across
            for head, (entropy, sink) in enumerate(zip(*rows, strict=True))
        ]
        _, layer, head = min(both)
        return replace(wanted, layer=str(layer), head=str(head))
    lost = wanted.head is not None and wanted.layer is None
    if lost and isinstance(subject.what, Seen) and len(subject.what) > 1:
        raise RegardError(
            "--head counts the heads of one layer",
            got=f"--head {wanted.head} without --layer",
            accepted=f"--layer 0 to {len(subject.what) - 1}",
        )
    return replace(wanted, layer=wanted.layer or "0", head=wanted.head or "mean")


def _across(subject: Subject) -> set[int]:
    """The layers whose queries and keys are of two texts."""
    if not isinstance(subject.what, Seen) or not subject.names:
        return set()
    names = (names_of(path, subject.names) for path in subject.what)
    return {at for at, found in enumerate(names) if found is not None and found[0] != found[1]}


def pick(subject: Subject, wanted: ViewOptions) -> Choice:
    """The layer and the head that are wanted."""
    if isinstance(subject.what, Trace) and wanted.layer not in (None, "0"):
        raise RegardError("there is only one layer", got=f"--layer {wanted.layer}", accepted="0")
    tokens, queries = subject.tokens, None
    if isinstance(subject.what, Seen) and subject.names:
        names = names_of(layer_of(subject.what, wanted.layer or 0)[1].path, subject.names)
        if names is not None:
            tokens = names[1]
            queries = names[0] if names[0] != names[1] else None
    return choose(
        subject.what,
        tokens,
        layer=wanted.layer or 0,
        head=_head(wanted.head),
        call=wanted.call,
        queries=queries,
    )


def placed(
    subject: Subject, wanted: ViewOptions, keys: Sequence[str], queries: Sequence[str]
) -> Place:
    """The place of the token that is wanted: by its text, else by its number.

    Of several with that text it is the last: under a causal mask that is the one that saw most."""
    if two_texts(keys, queries):
        place = Place(*(_found(wanted.token, names, len(names) - 1) for names in (queries, keys)))
        said = [*queries[:10], *keys[:10]]
    else:
        last = len(keys) - 1 if subject.token is None else subject.token
        key = _found(wanted.token, keys, last)
        query = -1 if key is None else key - (len(keys) - len(queries))
        place, said = Place(query if query >= 0 else None, key), list(keys[:20])
    if place == NOWHERE:
        most = max(len(keys), len(queries))
        raise RegardError(
            "--token is not in the text",
            got=repr(wanted.token),
            accepted=f"a {subject.unit} of the text, or a number from 1 to {most}",
            do=f"{subject.unit}s: " + " ".join(said),
        )
    return place


def _found(token: str | None, names: Sequence[str], otherwise: int) -> int | None:
    if token is None:
        return otherwise
    asked = clean(token).casefold()
    places = [i for i, name in enumerate(names) if asked and name.casefold() == asked]
    if places:
        return places[-1]
    return int(asked) - 1 if asked.isdecimal() and 1 <= int(asked) <= len(names) else None


def two_texts(keys: Sequence[str], queries: Sequence[str]) -> bool:
    """Whether queries are no keys: else they are the last of them."""
    return len(queries) > len(keys) or list(queries) != list(keys[len(keys) - len(queries) :])


def _head(head: str | None) -> Head:
    if head is None or head == "mean":
        return "mean"
    if head.removeprefix("-").isdecimal():
        return int(head)
    raise RegardError("--head is a number, or mean", got=repr(head), accepted="0, 1, 2, … or mean")
