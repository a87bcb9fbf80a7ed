"""The console that everything of the command is printed on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from regard.view.atlas import LEFT_TO_RIGHT
from regard.visible import visible


class PlainConsole(Console):
    r"""Prints no character that a terminal obeys, wherever a text is from; colours are its own.

    >>> from rich.text import Text
    >>> PlainConsole(width=40).print(Text("a \x1b]0;name of a model"))
    a \x1b]0;name of a model
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(highlight=False, **how)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                # The one mark that labels themselves put in: it ends a run from right to left.
                parts = map(visible, segment.text.split(LEFT_TO_RIGHT))
                yield Segment(LEFT_TO_RIGHT.join(parts), segment.style)
