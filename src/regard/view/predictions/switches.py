"""What is switched off while a model runs: heads, all heads of a layer, edges between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.interpret.interventions import CallPart, Cut, Intervention, Replaced
from regard.view.atlas import Atlas

MOST_SWITCHES = 64
"""Switches that are off at once, at most."""
FORMS = {
    "head": ("map", "head"),
    "layer": ("map",),
    "edge": ("map", "query", "key"),
    "pair": ("map", "query", "key", "head"),
}


@dataclass(frozen=True)
class Switch:
    """A head, a layer, the edge of two tokens in all layers like one, or in one head."""

    kind: str
    map: int
    head: int = -1
    query: int = -1
    key: int = -1


def switches(asked: str) -> list[Switch]:
    """Switches as an address tells them.

    >>> switches("head:4:5,edge:4:12:3")[0]
    Switch(kind='head', map=4, head=5, query=-1, key=-1)
    """
    given = [one for one in asked.split(",") if one]
    if len(given) > MOST_SWITCHES:
        raise RegardError(
            "too many parts are switched off at once",
            got=f"{len(given)} switches",
            accepted=f"{MOST_SWITCHES} at most",
            do="switch off whole layers",
        )
    return [_switch(one) for one in given]


def interventions(
    atlas: Atlas, off: Sequence[Switch], queries: int, written: bool
) -> list[Intervention]:
    """What switches do to a run over `queries` tokens; `written` says that these are of a text that
    is written while another is read, so that other layers have other queries."""
    found = (_intervention(atlas, switch, queries, written) for switch in dict.fromkeys(off))
    return [one for one in found if one is not None]


@dataclass(frozen=True, eq=False)
class EarlyCut(Cut):
    """Edges of the text that was there at first; later steps have queries of their own."""

    queries: int = 0

    def before(self, part: CallPart) -> AttentionInputs:
        return super().before(part) if self.queries == part.inputs.shape.Q else part.inputs


def _switch(one: str) -> Switch:
    kind, *places = one.split(":")
    names = FORMS.get(kind, ())
    plain = all(place.isdecimal() and len(place) < 10 for place in places)
    if not names or len(places) != len(names) or not plain:
        forms = (":".join((form, *(name.upper() for name in of))) for form, of in FORMS.items())
        raise RegardError("this cannot be switched off", got=repr(one[:40]),
                          accepted=", ".join(forms))  # fmt: skip
    return Switch(kind, **dict(zip(names, map(int, places), strict=True)))


def _intervention(atlas: Atlas, switch: Switch, queries: int, written: bool) -> Intervention | None:
    here = atlas[switch.map]
    heads, Q, K = here.shape
    for what, place, many in (("head", switch.head, heads), ("query", switch.query, Q),
                              ("key", switch.key, K)):  # fmt: skip
        if place >= many:
            raise RegardError(
                f"{here.name!r} has no such {what}", got=str(place), accepted=f"0 to {many - 1}"
            )
    every = list(range(heads))
    if switch.kind == "head":
        return Replaced({_path(here.name): [switch.head]})
    if switch.kind == "layer":
        return Replaced({_path(here.name): every})
    # The encoder reads all of its text, however much is written.
    whole = Q if written and (here.queries, Q) == (here.keys, K) and _encodes(here.name) else 0
    if not whole and (switch.query >= queries or (not written and switch.key >= queries)):
        # What comes later cannot matter here.
        return None
    if switch.kind == "pair":
        cut = {_path(here.name): [switch.head]}
    else:
        alike = [m for m in atlas.maps if (m.queries, m.keys, m.shape[1:]) ==
                 (here.queries, here.keys, (Q, K))]  # fmt: skip
        cut = {_path(m.name): list(range(m.shape[0])) for m in alike}
    return EarlyCut(cut, (switch.query, switch.key), queries=whole or queries)


def _encodes(name: str) -> bool:
    return name.startswith("encoder.")


def _path(name: str) -> str:
    if " · " in name:
        raise RegardError(
            "what was called several times for one text is not switched off",
            got=repr(name),
            accepted="layers that attend once",
        )
    return "" if name == "(model)" else name
