"""The notebook widget: the front end of page and app, asking a kernel instead of a server."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from regard.errors import RegardError
from regard.traces import Trace
from regard.view.answers import Answers
from regard.view.atlas import Atlas
from regard.view.bundle import script
from regard.watching.seen import Seen, Tokens


def widget(
    what: Trace | Seen | Atlas,
    tokens: Tokens | None = None,
    *,
    queries: Sequence[str] | None = None,
    batch: int = 0,
    height: int = 640,
) -> Any:
    """What was seen, as the last line of a notebook's cell: Jupyter, VS Code, Colab or marimo.

    Its `view` is what is being looked at: layer (`map`), `head`, the `query` and `key` in the
    middle, the `token` of the text. It follows the mouse, and setting it moves the widget."""
    if find_spec("anywidget") is None:
        raise RegardError(
            "the notebook widget is made with anywidget, which is not installed",
            do="pip install regard[notebook]",
        )
    import anywidget
    import traitlets

    answers = Answers(Atlas.of(what, tokens, queries=queries, batch=batch))

    class Widget(anywidget.AnyWidget):  # type: ignore[misc, no-any-unimported, unused-ignore]
        _esm = script()
        view = traitlets.Dict().tag(sync=True)
        height = traitlets.Int().tag(sync=True)

        def answered(self, _: object, content: Any, buffers: object) -> None:
            """Answer one question of the front end."""
            number = content.get("number") if isinstance(content, dict) else None
            try:
                asked = {str(name): str(word) for name, word in content["asked"].items()}
                _, body = answers.answer(str(content["name"]), asked)
            except (RegardError, KeyError, TypeError, AttributeError) as error:
                self.send({"number": number, "error": str(error)})
            else:
                self.send({"number": number}, [body])

    made = Widget(height=height)
    made.on_msg(made.answered)
    return made
