"""The widget's half in the kernel: it answers the front end, and knows what is looked at.

Questions are messages `{number, name, asked}`, of which `program` asks for the later part of the
front end, or `{number, stop}` when nobody waits any more;
answers are `{number}` with one buffer, or `{number, error}`. Each is computed on a thread of its
own, so that cells run while a long one is read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import anywidget
import traitlets

from regard.errors import RegardError
from regard.view.atlas import Atlas, CancelledError, Map, Summary, check_place
from regard.view.web.atlas_queries import Answers
from regard.view.web.bundle import script

logger = logging.getLogger(__name__)


class Selection(NamedTuple):
    """What was picked: a head of a layer, and of its map a query, a key, or a pair of them."""

    layer: str
    head: int
    query: int | None = None
    key: int | None = None


class AttentionWidget(anywidget.AnyWidget):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """An atlas in a notebook. `regard.view.widget` makes it.

    >>> import regard, torch
    >>> x = torch.randn(1, 2, 5, 4)
    >>> live = AttentionWidget(Atlas.of(regard.trace(x, x, x)))
    >>> live.view = {"map": 0, "head": 1, "picked": [4, 2]}
    >>> live.selection
    Selection(layer='trace', head=1, query=4, key=2)
    """

    _esm = traitlets.Unicode().tag(sync=True)
    view = traitlets.Dict().tag(sync=True)
    """What is looked at. It follows the hand, and setting it moves the widget."""
    height = traitlets.Int().tag(sync=True)
    selection = traitlets.Instance(Selection, read_only=True)
    """What of it is picked."""

    def __init__(self, atlas: Atlas, height: int = 640) -> None:
        self._answers = Answers(atlas)
        self._waiting: set[object] = set()
        super().__init__(_esm=script(), height=height)
        self._picked()
        self.observe(self._picked, "view")
        self.on_msg(self._on_message)

    def close(self) -> None:
        """Take the widget away, and stop what is being computed for it."""
        self._waiting.clear()
        super().close()

    def _picked(self, _: object = None) -> None:
        self.set_trait("selection", selected(self._answers.atlas, self.view))

    def _on_message(self, _: object, content: Any, buffers: object) -> None:
        number = content.get("number") if isinstance(content, dict) else None
        if not isinstance(number, str):
            return
        if content.get("stop"):
            self._waiting.discard(number)
            return
        self._waiting.add(number)
        threading.Thread(target=self._answer, args=(number, content), daemon=True).start()

    def _answer(self, number: str, content: dict[str, Any]) -> None:
        try:
            asked = {str(name): str(word) for name, word in content["asked"].items()}
            name = str(content["name"])
            if name == "program":
                body = script("later").encode()
            else:
                _, body = self._answers.answer(name, asked, lambda: number in self._waiting)
        except CancelledError:
            return
        except Exception as error:
            # An exception in a thread reaches no caller: the front end gets the error, and the
            # traceback is logged.
            if not isinstance(error, RegardError):
                logger.exception("a question of the widget was not answered")
            self.send({"number": number, "error": str(error) or type(error).__name__})
        else:
            self.send({"number": number}, [body])
        finally:
            self._waiting.discard(number)


def selected(atlas: Atlas, view: Mapping[str, Any]) -> Selection:
    """What a view of an atlas has picked: in the text a token, else a pair of the map."""
    layers: Sequence[Map | Summary] = atlas.maps or atlas.summaries
    place = view.get("map", 0)
    check_place(place, len(layers), "map")
    head = Selection(layers[place].name, view.get("head", 0))
    if view.get("view") == "text":
        token = view.get("token", -1)
        side = "key" if view.get("direction") == "seen" else "query"
        return head._replace(**{side: token}) if token >= 0 else head
    picked = list(view.get("picked", []))
    return head._replace(query=picked[0], key=picked[1]) if len(picked) == 2 else head
