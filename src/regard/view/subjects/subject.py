"""What is looked at: a text that is read now, or what was seen before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from regard.models.readers import Reader
from regard.seen import Seen
from regard.traces import Trace
from regard.view.atlas import Atlas
from regard.view.subjects.model_runs import Names, TextInfo, named


@dataclass(frozen=True, eq=False)
class Subject:
    """What is looked at, and what is said of it."""

    what: Trace | Seen
    tokens: Sequence[str] | None
    title: str
    about: str
    unit: str = "token"
    token: int | None = None
    """Where to look when nobody says: the last token, if this does not either."""
    told: TextInfo = field(default_factory=TextInfo)
    """The text and the model, where they are known."""
    names: dict[str, Names] = field(default_factory=dict)
    """What places of layers are called, where there is more than one text."""
    reader: Reader | None = None
    """The model that read it, where it is still open."""

    def atlas(self) -> Atlas:
        """The maps of all layers."""
        made = Atlas.of(self.what, self.tokens).know(self.told.badges)
        return named(made, self.told.model, self.names)
