"""A trace across ranks has what a trace has, or the documentation says why not."""

from __future__ import annotations

from pathlib import Path

from regard import Trace
from regard.parallel import ParallelTrace
from regard.parallel.call import Part
from regard.parallel.methods.ring.ring_trace import RingTrace

MISSING = {"inputs", "second_pass", "of", "of_weights", "save", "to"}
AXES = {"__getitem__", "__len__", "__iter__"}
DOCUMENT = Path(__file__).parents[2] / "docs" / "parallel.md"


def names(kind: type) -> set[str]:
    found = {*dir(kind), *getattr(kind, "__dataclass_fields__", {})}
    return {name for name in found if not name.startswith("_")} | (found & AXES)


def test_what_a_trace_has_is_there_or_named() -> None:
    assert names(Trace) - names(ParallelTrace) == MISSING | AXES
    text = DOCUMENT.read_text("utf-8")
    section = text[text.index("### What a plain trace has beyond it") :].split("\n## ")[0]
    for name in (*sorted(MISSING), "[...]", "len", "iter"):
        assert f"`{name}`" in section, name


def test_a_ring_is_asked_what_other_parts_are() -> None:
    asked = {name for name in vars(Part) if not name.startswith("_")}
    assert asked <= names(RingTrace)
    assert asked <= names(Trace)


def test_placements_name_every_answer() -> None:
    answers = {name.split("(")[0] for name in ParallelTrace.placements}
    asked = names(Trace) & names(ParallelTrace)
    assert asked - answers == {"rows", "backend", "mask", "detach"}
