"""The notebook widget: the front end of page and app, asking a kernel instead of a server."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from regard.errors import RegardError
from regard.seen import Seen, Tokens
from regard.traces import Trace
from regard.view.atlas import Atlas, Weights

if TYPE_CHECKING:
    from regard.view.web.widget_model import AttentionWidget


def widget(
    what: Trace | Seen | Weights | Atlas,
    tokens: Tokens | None = None,
    *,
    queries: Sequence[str] | None = None,
    batch: int = 0,
    height: int = 640,
) -> AttentionWidget:
    """What was seen, as the last line of a notebook's cell: Jupyter, VS Code, Colab or marimo.

    Its `selection` is what was picked: the layer, the head, and the query and the key of the pair
    that was clicked, or the token that the text is about. Its `view` is all that is looked at;
    setting it moves the widget. `close()` takes it away.

    >>> import regard, torch
    >>> x = torch.randn(1, 2, 5, 4)
    >>> w = widget(regard.trace(x, x, x), tokens=["To", " read", " is", " to", " look"])
    >>> w.observe(lambda change: print(change.new), "selection")
    >>> w.view = {"head": 1, "picked": [4, 0]}  # as a click does
    Selection(layer='trace', head=1, query=4, key=0)
    """
    if not installed():
        raise RegardError(
            "the notebook widget is made with anywidget, which is not installed",
            do="pip install 'regard[notebook]'",
        )
    from regard.view.web.widget_model import AttentionWidget

    return AttentionWidget(Atlas.of(what, tokens, queries=queries, batch=batch), height)


def installed() -> bool:
    """Whether this Python can make widgets."""
    return find_spec("anywidget") is not None
